# ---- counters -----------------------------------------------------------------------------

cdef int _planned(const Pending *p) noexcept nogil:
    """How many tokens the loop drafted, as far as it told."""
    return 0 if p.dropped else p.seen - (1 if p.stop >= 0 else 0)


cdef int32_t _token(const Pending *p, int i) noexcept nogil:
    """Draft token i as the target saw it, -1 if unknown."""
    if p.sent >= 0:
        return p.tokens[i] if i < p.sent else -1
    if i < POSITIONS and i < p.seen and p.at[i].count > 0:
        return p.at[i].ids[0]
    return -1


cdef void _count_reached(Counters *c, const Candidates *a, int i, int32_t choice) noexcept nogil:
    """Adds the target's choice at a reached position to the ranks, sums and deciles."""
    cdef int r, rank = 0
    cdef uint64_t[8] p
    cdef uint64_t[8] p_top10
    for r in range(a.count):
        if a.ids[r] == choice:
            rank = r + 1
        p[r] = units_of(_share(a.logits[r], a.lse))
        p_top10[r] = units_of(_share(a.logits[r], a.lse_top10))
    count_choice(c, i, rank, a.count, p, p_top10)


cdef bint _resolve(State *s, int64_t n_past, int32_t id_last) noexcept nogil:
    """Closes the pending draft by the next call's position and token; True if it was verified."""
    cdef Pending *p = &s.pending
    cdef Counters *c = &s.total
    cdef int i, length, sent, reached
    cdef int64_t accepted = n_past - p.n_past - 1
    cdef bint ended = False, tree = p.depth >= 0, side
    p.active = False
    if p.broken:
        c.invalid += 1
        return False
    sent = _planned(p) if p.sent < 0 else p.sent
    length = p.depth if tree else sent
    if p.replayed >= 0:
        # the accepted part and the target's own token were decoded again: what follows them
        # belongs to that second pass
        if accepted != p.replayed:
            c.discarded += 1
            return False
        accepted = p.replay_at
        id_last = p.replay_token
    if accepted < 0 or accepted > length:
        c.discarded += 1
        return False
    if accepted < sent and _token(p, <int>accepted) == id_last:
        # generation ended inside the accepted prefix: what the draft held after it was never
        # put to the question
        accepted += 1
        length = <int>accepted
        ended = True
    if tree and accepted != sent:
        c.discarded += 1
        return False
    reached = <int>accepted if tree and p.leaf else min(length, <int>accepted + 1)
    # a sibling of what p_min went on to judge
    side = tree and 0 < accepted <= POSITIONS and (
        p.tokens[accepted - 1] != p.at[accepted - 1].ids[0]
    )
    count_verification(c, length, reached, accepted)
    for i in range(min(reached, <int>POSITIONS)):
        _count_reached(c, &p.at[i], i, _token(p, i) if i < accepted else id_last)
    if p.dropped:
        return True
    if p.stop >= 0 and length == p.stop and not ended:
        count_stop(c, length, accepted == length and not side, length < POSITIONS and
                   p.at[length].count > 0 and p.at[length].ids[0] == id_last)
    elif reached == accepted and (length > 0 or p.sent >= 0):
        count_censored(c, accepted, REASON_END if ended else p.reason)
    return True


@cython.overflowcheck(False)
cdef int _slot(int32_t seq, int32_t slots) noexcept nogil:
    # Fibonacci hashing: server slots are 0, 1, 2, ..., other engines use ids of any pattern
    return <int>((<uint64_t>seq * <uint64_t>0x9e3779b97f4a7c15) >> 33) & (slots - 1)


cdef void _add(Counters *a, const Counters *b) noexcept nogil:
    cdef size_t i
    for i in range(sizeof(Counters) // sizeof(uint64_t)):
        (<uint64_t *>a)[i] += (<const uint64_t *>b)[i]


cdef void _abandon(State *s) noexcept nogil:
    """Closes a draft whose outcome is not known."""
    s.pending.active = False
    if s.pending.broken:
        s.total.invalid += 1
    else:
        s.total.unresolved += 1


cdef void _replay(Pending *p, const int32_t *tokens, int n) noexcept nogil:
    """A shortened draft sent again after a checkpoint was restored.

    Engines that cannot roll back decode the accepted tokens and the target's own token once
    more; where that differs from the first draft is where the first one was rejected.
    """
    cdef int i = 0
    while i < n and i < p.sent and tokens[i] == p.tokens[i]:
        i += 1
    if i < n:
        p.replayed = n
        p.replay_at = i
        p.replay_token = tokens[i]


cdef int _reason(reason) except -1:
    if reason not in CENSOR_REASONS:
        raise InputError(f"verify(): reason {reason!r} is none of {', '.join(CENSOR_REASONS)}")
    return CENSOR_REASONS.index(reason)


cdef int _tokens(tokens, int32_t *out) except -1:
    """Copies draft tokens, without the -1 an engine padded them with; returns how many."""
    cdef int n = 0
    cdef int64_t t
    cdef bint padding = False
    for token in tokens:
        t = token
        if t == -1:
            padding = True
            continue
        if padding or t < 0 or t > 0x7fffffff:
            raise InputError(f"verify(): {t} is no token, or stands after the padding")
        if n == DRAFT:
            raise InputError(f"verify(): a draft has at most {DRAFT} tokens")
        out[n] = <int32_t>t
        n += 1
    return n


cdef class Collector:
    """The hot half of :class:`mtpstats.stats.Collector`, which has the documentation.

    Off, it holds no memory but the object, and no call reads or allocates anything.
    """

    def __cinit__(self, n_max=None, *, bint enabled=True, int64_t every=0, sink=None):
        if n_max is not None and not 1 <= n_max <= DRAFT:
            raise InputError(f"n_max {n_max} is outside 1..{DRAFT}")
        if every < 0:
            raise InputError(f"every cannot be {every}")
        self._n_max = 0 if n_max is None else n_max
        self._every = every if sink is not None else 0
        self._sink = sink
        if enabled:
            self._grow()

    def __dealloc__(self):
        cdef int i
        for i in range(self._slots):
            free(self._states[i])
        free(self._states)
        free(self._ids)

    cdef int _grow(self) except -1:
        """Doubles the table (or makes it) and moves the sequences over."""
        cdef int32_t slots = 2 * self._slots if self._slots else 16
        cdef State **states = <State **>calloc(slots, sizeof(State *))
        cdef int32_t *ids = <int32_t *>malloc(slots * sizeof(int32_t))
        cdef int i, j
        if states == NULL or ids == NULL:
            free(states)
            free(ids)
            raise MemoryError
        memset(ids, 0xff, slots * sizeof(int32_t))
        for i in range(self._slots):
            if self._ids[i] >= 0:
                j = _slot(self._ids[i], slots)
                while ids[j] >= 0:
                    j = (j + 1) & (slots - 1)
                ids[j] = self._ids[i]
                states[j] = self._states[i]
        free(self._states)
        free(self._ids)
        self._states = states
        self._ids = ids
        self._slots = slots
        return 0

    cdef State *_find(self, int seq) except NULL:
        """The state of a sequence, made when it is new."""
        cdef int i
        cdef State *s
        if seq < 0:
            raise InputError(f"a sequence id cannot be {seq}")
        i = _slot(seq, self._slots)
        while self._ids[i] >= 0:
            if self._ids[i] == seq:
                return self._states[i]
            i = (i + 1) & (self._slots - 1)
        if 2 * self._used >= self._slots:
            self._grow()
            i = _slot(seq, self._slots)
            while self._ids[i] >= 0:
                i = (i + 1) & (self._slots - 1)
        s = <State *>calloc(1, sizeof(State))
        if s == NULL:
            raise MemoryError
        self._states[i] = s
        self._ids[i] = seq
        self._used += 1
        return s

    cdef Pending *_open(self, int seq, str call) except NULL:
        cdef Pending *p = &self._find(seq).pending
        if not p.active:
            raise InputError(f"{call}: sequence {seq} has no draft; call draft() first")
        return p

    cdef int _position(self, Pending *p, int seq, int position) except -1:
        """Checks that candidates for a position may come now."""
        if not p.active:
            raise InputError(f"candidates(): sequence {seq} has no draft; call draft() first")
        if p.sent >= 0 or p.dropped or p.stop >= 0:
            raise InputError(f"candidates(): the draft of sequence {seq} is already closed")
        if position != p.seen:
            raise InputError(f"candidates(): sequence {seq} is at draft position {p.seen}, "
                             f"not {position}; give each position once, in order")
        if position >= (self._n_max if self._n_max else <int>DRAFT):
            raise InputError(f"candidates(): draft position {position} is beyond a draft of "
                             f"{self._n_max if self._n_max else DRAFT} tokens")
        return 0

    cdef int _store(self, State *s, const mtp_row *r) except -1:
        cdef Pending *p = &s.pending
        cdef Candidates *a = &p.at[p.seen]
        a.count = min(r.count, <int>RANKS)
        memcpy(a.ids, r.ids, sizeof(a.ids))
        memcpy(a.logits, r.logits, sizeof(a.logits))
        a.lse = r.lse
        a.lse_top10 = r.lse_top10
        if r.n_bad:
            s.total.nan_rows += 1
        if r.padded:
            s.total.padded_rows += 1
        if r.count == 0:
            p.broken = True
        p.seen += 1
        return 0

    cdef int _report(self) except -1:
        if self._every > 0 and self._since >= self._every:
            self._since = 0
            self._sink(self.snapshot())
        return 0

    @property
    def enabled(self):
        """Whether anything is collected."""
        return self._states != NULL

    @property
    def every(self):
        """Verifications between two reports to the sink, 0 for none."""
        return self._every

    def begin(self, int seq):
        """A new generation starts on this sequence; a draft still open counts as unresolved."""
        cdef State *s
        if self._states == NULL:
            return
        s = self._find(seq)
        if s.pending.active:
            _abandon(s)

    def draft(self, int seq, int64_t n_past, int32_t id_last):
        """A draft starts at ``n_past`` after ``id_last``; this also resolves the one before."""
        cdef State *s
        cdef Pending *p
        if self._states == NULL:
            return
        if n_past < 0:
            raise InputError(f"draft(): n_past cannot be {n_past}")
        s = self._find(seq)
        p = &s.pending
        if p.active and _resolve(s, n_past, id_last):
            self._since += 1
        p.active = True
        p.n_past = n_past
        p.id_last = id_last
        p.seen = 0
        p.sent = -1
        p.stop = -1
        p.reason = 0
        p.dropped = False
        p.broken = False
        p.replayed = -1
        p.depth = -1
        self._report()

    def candidates(self, int seq, int position, logits, n_vocab=None):
        """The head's logits, float32[n], at a draft position (0, 1, 2, ... in order)."""
        cdef State *s
        cdef mtp_row row
        cdef int64_t tokens
        if self._states == NULL:
            return
        s = self._find(seq)
        self._position(&s.pending, seq, position)
        if position >= POSITIONS:
            s.pending.seen += 1
            return
        tokens = -1 if n_vocab is None else n_vocab
        if n_vocab is not None and tokens < 0:
            raise InputError(f"n_vocab cannot be {n_vocab}")
        _read_buffer(&row, logits, tokens)
        # reading ran foreign code, which may even have reset this collector
        s = self._find(seq)
        self._position(&s.pending, seq, position)
        self._store(s, &row)

    def candidates_at(self, int seq, int position, uint64_t address, int64_t n,
                      int64_t n_vocab=-1):
        """The same for n float32 at an address, which must be valid during the call."""
        cdef State *s
        cdef mtp_row row
        if self._states == NULL:
            return
        s = self._find(seq)
        self._position(&s.pending, seq, position)
        if position >= POSITIONS:
            s.pending.seen += 1
            return
        _read_address(&row, address, n, n_vocab, True)
        self._store(s, &row)

    def candidates_row(self, int seq, int position, Row row not None):
        """The same from a row already read with ``read`` or ``read_at``."""
        cdef State *s
        if self._states == NULL:
            return
        s = self._find(seq)
        self._position(&s.pending, seq, position)
        if position >= POSITIONS:
            s.pending.seen += 1
            return
        row._need_lse()
        self._store(s, &row.row)

    def stop(self, int seq, int position):
        """``p_min`` ended the draft here: candidates seen, nothing drafted."""
        cdef Pending *p
        if self._states == NULL:
            return
        p = self._open(seq, "stop()")
        if p.sent >= 0 or p.dropped or p.stop >= 0:
            raise InputError(f"stop(): the draft of sequence {seq} is already closed")
        if position < 0 or position != p.seen - 1:
            raise InputError(f"stop(): position {position} is not the last one with candidates")
        p.stop = position

    def verify(self, int seq, tokens, reason="n_max"):
        """The draft that was really sent to the target, and why it is no longer."""
        cdef State *s
        cdef Pending *p
        cdef int32_t[1024] sent
        cdef int n, why, planned
        if self._states == NULL:
            return
        n = _tokens(tokens, sent)
        why = _reason(reason)
        p = self._open(seq, "verify()")
        if p.sent >= 0:
            _replay(p, sent, n)
            return
        planned = _planned(p)
        if n > planned:
            raise InputError(f"verify(): {n} tokens sent, but candidates were given for a draft "
                             f"of {planned}")
        s = self._find(seq)
        p.sent = n
        p.reason = why
        memcpy(p.tokens, sent, n * sizeof(int32_t))
        s.total.cut_tokens += planned - n

    def verify_tree(self, int seq, tokens, int depth, bint leaf, reason="n_max"):
        """A tree was verified, ``depth`` deep, and ``tokens`` of it were accepted.

        Candidates are those on that path, which follows from the target's choices: give them
        before this, as far as they were put to the question. ``leaf``: nothing of the tree followed
        the path; ``reason``: why not. ``n_past`` and ``id_last`` of the next call must agree.
        """
        cdef State *s
        cdef Pending *p
        cdef int32_t[1024] path
        cdef int n, why
        if self._states == NULL:
            return
        n = _tokens(tokens, path)
        why = _reason(reason)
        p = self._open(seq, "verify_tree()")
        if p.sent >= 0 or p.dropped:
            raise InputError(f"verify_tree(): the draft of sequence {seq} is already closed")
        if n > depth or depth > DRAFT:
            raise InputError(f"verify_tree(): {n} tokens of a tree that is {depth} deep")
        if p.seen < (n if leaf else n + 1):
            raise InputError(f"verify_tree(): {n} tokens were accepted, but candidates were given "
                             f"for {p.seen} positions")
        s = self._find(seq)
        p.sent = n
        p.depth = depth
        p.leaf = leaf
        p.reason = why
        memcpy(p.tokens, path, n * sizeof(int32_t))
        s.total.cut_tokens += max(0, _planned(p) - depth)

    def drop(self, int seq):
        """The draft was thrown away (``n_min``); the target decodes ``id_last`` alone."""
        cdef Pending *p
        cdef int planned
        if self._states == NULL:
            return
        p = self._open(seq, "drop()")
        if p.sent >= 0 or p.dropped:
            raise InputError(f"drop(): the draft of sequence {seq} is already closed")
        planned = _planned(p)
        if planned > 0:
            p.dropped = True
            self._find(seq).total.dropped_drafts += 1
            self._find(seq).total.dropped_tokens += planned

    def invalid(self, int seq):
        """The round is invalid (NaN in the target): it is counted as such and nothing else."""
        if self._states == NULL:
            return
        self._open(seq, "invalid()").active = False
        self._find(seq).total.invalid += 1

    def finish(self, int seq, n_past=None, id_last=None):
        """The generation is over; see :class:`mtpstats.stats.Collector`."""
        cdef State *s
        cdef int64_t past = -1
        cdef int32_t last = -1
        if self._states == NULL:
            return
        if (n_past is None) != (id_last is None):
            raise InputError("finish(): give both n_past and id_last, or neither")
        if n_past is not None:
            past = n_past
            last = id_last
            if past < 0:
                raise InputError(f"finish(): n_past cannot be {past}")
        s = self._find(seq)
        if not s.pending.active:
            return
        if past < 0:
            _abandon(s)
        elif _resolve(s, past, last):
            self._since += 1
            self._report()

    def sequences(self):
        """Ids of the sequences seen so far, ascending."""
        return sorted([self._ids[i] for i in range(self._slots) if self._ids[i] >= 0])

    def counters(self, seq=None, bint zero=False):
        """All counters of a sequence (None: of all, added) as bytes, uint64 in LAYOUT's order.

        zero: set them to 0 afterwards. A sequence never seen has zeros.
        """
        cdef Counters total
        cdef int i
        cdef int only = -1 if seq is None else seq
        if seq is not None and only < 0:
            raise InputError(f"a sequence id cannot be {seq}")
        memset(&total, 0, sizeof(Counters))
        for i in range(self._slots):
            if self._ids[i] >= 0 and (only < 0 or self._ids[i] == only):
                _add(&total, &self._states[i].total)
                if zero:
                    memset(&self._states[i].total, 0, sizeof(Counters))
        return (<char *>&total)[:sizeof(Counters)]

    def reset(self):
        """Forget everything, open drafts included."""
        cdef int i
        for i in range(self._slots):
            free(self._states[i])
            self._states[i] = NULL
            self._ids[i] = -1
        self._used = 0
        self._since = 0


@cython.final
cdef class Empty:
    """The yardstick of benchmarks/off.py: methods that take the same arguments and do nothing."""

    def draft(self, int seq, int64_t n_past, int32_t id_last):
        """Do nothing."""

    def candidates(self, int seq, int position, logits, n_vocab=None):
        """Do nothing."""

    def candidates_at(self, int seq, int position, uint64_t address, int64_t n,
                      int64_t n_vocab=-1):
        """Do nothing."""
