# ---- every rank path of a trace


cdef class Paths:
    """The trie of all rank paths, and where each root's path ends in it.

    Node 0 is the root; a parent stands before its children. ``parent`` int32[n], ``rank`` and
    ``depth`` uint8[n]. The limits are those of :class:`Run`.
    """

    cdef Store store
    cdef Limits limits
    cdef int32_t *_end      # [roots of all texts] the deepest node of each root's path
    cdef int64_t *_start    # [texts] where a text's roots start in it
    cdef const int32_t[::1] _parent
    cdef const uint8_t[::1] _depth
    cdef readonly object parent, rank, depth
    cdef readonly int n

    def __cinit__(self, Store store not None, int64_t n_predict, int64_t n_ctx):
        cdef Text *x
        cdef int i, r, d, at, rank
        cdef int64_t place = 0
        cdef size_t size = 1024
        cdef int32_t *child = NULL
        cdef int32_t *bigger
        self.store = store
        self.limits.n_predict = n_predict
        self.limits.n_ctx = n_ctx
        self._end = <int32_t *>malloc((store.roots + 1) * sizeof(int32_t))
        self._start = <int64_t *>malloc((store.n + 1) * sizeof(int64_t))
        child = <int32_t *>calloc(size * 9, sizeof(int32_t))
        if self._end == NULL or self._start == NULL or child == NULL:
            free(child)
            raise MemoryError
        self.n = 1
        for i in range(store.n):
            x = &store.texts[i]
            self._start[i] = place
            for r in range(x.roots):
                at = 0
                for d in range(x.depth):
                    rank = x.rank[r * x.depth + d]
                    if rank == 0 or rank == UNKNOWN:
                        break
                    if child[at * 9 + rank] == 0:
                        if <size_t>self.n == size:
                            bigger = <int32_t *>realloc(child, 2 * size * 9 * sizeof(int32_t))
                            if bigger == NULL:
                                free(child)
                                raise MemoryError
                            child = bigger
                            memset(child + size * 9, 0, size * 9 * sizeof(int32_t))
                            size *= 2
                        child[at * 9 + rank] = self.n
                        self.n += 1
                    at = child[at * 9 + rank]
                self._end[place] = at
                place += 1
        self._name(child)
        free(child)

    def keep(self, const uint8_t[::1] kept not None):
        """Leave out the nodes that are 0 in ``kept`` (uint8[n]), as all below them must be.

        Paths then end at the last node that is left. Numbers of nodes change, their order does not.
        """
        cdef int at, n = 1
        cdef int64_t place
        cdef int32_t[::1] now = np.zeros(self.n, np.int32)
        for at in range(1, self.n):
            if kept[at]:
                now[at] = n
                n += 1
        for place in range(self.store.roots):
            at = self._end[place]
            while at and not now[at]:
                at = self._parent[at]
            self._end[place] = now[at]
        left = np.flatnonzero(now)
        left = np.concatenate(([0], left))
        self.parent = np.asarray(now)[self.parent[left]]
        self.rank, self.depth, self.n = self.rank[left], self.depth[left], n
        self._parent, self._depth = self.parent, self.depth

    cdef _name(self, const int32_t *child):
        cdef int at, rank, below
        cdef int32_t[::1] parent = np.zeros(self.n, np.int32)
        cdef uint8_t[::1] ranks = np.zeros(self.n, np.uint8)
        cdef uint8_t[::1] depth = np.zeros(self.n, np.uint8)
        for at in range(self.n):
            for rank in range(1, RANKS + 1):
                below = child[at * 9 + rank]
                if below:
                    parent[below] = at
                    ranks[below] = rank
                    depth[below] = depth[at] + 1
        self._parent, self._depth = parent, depth
        self.parent, self.rank, self.depth = map(np.asarray, (parent, ranks, depth))

    def __dealloc__(self):
        free(self._end)
        free(self._start)

    cdef int64_t _easy(self, const Text *x, int depth) noexcept nogil:
        """Up to which root no limit, end or gap can matter to a tree of this depth."""
        cdef int64_t n_ctx = _context(x, &self.limits)
        cdef int64_t easy = min(<int64_t>x.roots, x.tokens - 1 - x.first - depth)
        if x.blind or x.holes:
            return 0
        if self.limits.n_predict >= 0:
            easy = min(easy, self.limits.n_predict - depth)
        if n_ctx >= 0:
            easy = min(easy, n_ctx - 1 - x.first - depth)
        if x.eog >= 0:
            easy = min(easy, <int64_t>x.eog - 1 - x.first - depth)
        return easy

    cdef void _sum_up(self, int64_t[::1] counts) noexcept nogil:
        """Turns counts of ends into counts of prefixes."""
        cdef int at
        for at in range(self.n - 1, 0, -1):
            counts[self._parent[at]] += counts[at]

    def counts(self, const int64_t[::1] weights not None):
        """How many uniform starts have each node as a prefix of their path, int64[n].

        ``weights`` int64[texts]: how often each text counts.
        """
        cdef int i, r
        cdef Text *x
        found = np.zeros(self.n, np.int64)
        cdef int64_t[::1] counts = found
        with nogil:
            for i in range(self.store.n):
                x = &self.store.texts[i]
                if weights[i]:
                    for r in range(x.roots):
                        if _counts(x, &self.limits, r):
                            counts[self._end[self._start[i] + r]] += weights[i]
            self._sum_up(counts)
        return found

    def walk(self, const uint8_t[::1] chosen not None, const int64_t[::1] weights not None):
        """Replay the tree of the nodes that are ``chosen`` (uint8[n], not 0).

        Returns (verifications, tokens, counts): int64[texts] twice, and int64[n], how many of the
        starts, times the ``weights`` of the texts, have each node as a prefix of their path. Texts
        of weight 0 are left out.
        """
        cdef int i, r, at, accepted, depth = 0, root
        cdef Text *x
        cdef Out o
        cdef Plan plan
        cdef int64_t passes, easy
        found = np.zeros(self.n, np.int64)
        cdef int64_t[::1] counts = found
        table = np.zeros((2, self.store.n), np.int64)
        cdef int64_t[:, ::1] totals = table
        cdef int8_t[::1] reach = np.zeros(self.n, np.int8)
        cdef uint8_t[::1] inner = np.zeros(self.n, np.uint8)
        with nogil:
            memset(&o, 0, sizeof(o))
            for at in range(1, self.n):
                reach[at] = reach[self._parent[at]]
                if chosen[at]:
                    reach[at] = self._depth[at]
                    inner[self._parent[at]] = 1
                    depth = max(depth, <int>self._depth[at])
            for i in range(self.store.n):
                if weights[i] == 0:
                    continue
                x = &self.store.texts[i]
                r = 0
                passes = 0
                o.stop = GOING
                easy = self._easy(x, depth)
                while _may_go_on(x, &self.limits, r, &o):
                    while r < easy:
                        at = self._end[self._start[i] + r]
                        counts[at] += weights[i]
                        passes += 1
                        r += reach[at] + 1
                    if not _may_go_on(x, &self.limits, r, &o):
                        break
                    plan = _plan(x, &self.limits, r, depth, 0)
                    at = self._end[self._start[i] + r]
                    accepted = min(<int>reach[at], plan.limit)
                    root = x.first + r
                    if root + accepted + 1 >= x.tokens:
                        if root + accepted != x.eog:
                            break
                        o.stop = STOP_EOG
                        accepted -= 1
                    elif (
                        accepted < plan.limit and inner[at]
                        and x.rank[r * x.depth + accepted] == UNKNOWN
                    ):
                        break
                    elif root + accepted + 1 == x.eog:
                        o.stop = STOP_EOG
                    counts[at] += weights[i]
                    passes += 1
                    r += accepted + 1
                totals[0, i] = passes
                totals[1, i] = r
            self._sum_up(counts)
        return table[0], table[1], found
