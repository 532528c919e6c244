# ---- one verification


cdef inline int64_t _context(const Text *x, const Limits *lim) noexcept nogil:
    return lim.n_ctx if lim.n_ctx >= 0 else x.n_ctx


cdef inline Plan _plan(
    const Text *x, const Limits *lim, int r, int n_max, int n_min
) noexcept nogil:
    """How far to draft at root r, as ``Slot.plan``."""
    cdef Plan plan
    cdef int64_t budget, room, n_ctx
    plan.limit = n_max
    plan.reason = REASON_N_MAX
    plan.n_steps = n_max
    if lim.uniform:
        return plan
    if lim.n_predict >= 0:
        budget = lim.n_predict - r - 1
        if 0 < budget < plan.limit:
            plan.limit = <int32_t>budget
            plan.reason = REASON_BUDGET
    n_ctx = _context(x, lim)
    if n_ctx >= 0:
        room = n_ctx - (x.first + r) - 2
        if room < plan.limit:
            plan.limit = <int32_t>max(room, <int64_t>0)
            plan.reason = REASON_CONTEXT
        plan.n_steps = <int32_t>min(<int64_t>max(plan.limit, n_min), room + 1)
    else:
        plan.n_steps = max(plan.limit, n_min)
    if x.blind and r == 0:
        plan.limit = 0
        plan.reason = REASON_CONTEXT
    if plan.limit == 0:
        plan.n_steps = 0
    return plan


cdef inline void _choice(
    Counters *c, int i, int rank, const float *p, double top10, double p_top10
) noexcept nogil:
    """Counts a reached position; ``p_top10`` is rank 1's softmax over the 10 best, if known."""
    cdef uint64_t[8] a
    cdef uint64_t[8] b
    cdef int r, n = RANKS
    cdef double share, scale = 1.0 / top10 if top10 > 0 else 0.0
    while n > 0 and isnan(p[n - 1]):
        n -= 1
    for r in range(n):
        a[r] = units_of(p[r])
        share = p[r] * scale
        b[r] = units_of(share if share < 1.0 else 1.0)
    if n > 0 and p_top10 >= 0:
        b[0] = units_of(p_top10)
    count_choice(c, i, rank, n, a, b)


cdef inline bint _close(float a, float b) noexcept nogil:
    """Whether noise could swap two probabilities, a before b."""
    return a < b * HEAD_RATIO


cdef inline bint _near(double p, double bound) noexcept nogil:
    return bound - NOISE < p < bound + NOISE


cdef inline bint _target_tie(const Text *x, int r, int accepted) noexcept nogil:
    """Whether one of the target's choices of this verification was a near tie."""
    cdef int i, at = r * x.every
    for i in range(at, min(at + accepted + 1, x.tokens - 1 - x.first)):
        if x.margin[i] < TARGET_TIE:
            return True
    return False


cdef inline bint _chain_tie(
    const Text *x, int r, const Rule *k, int steps, int drafted, int length, int greedy,
    int accepted
) noexcept nogil:
    cdef int d, rank
    cdef const float *p
    if _target_tie(x, r, accepted):
        return True
    for d in range(steps):
        p = x.p + (r * x.depth + d) * RANKS
        if k.p_min > 0 and _near(x.p_min_p[r * x.depth + d], k.p_min):
            return True
        if d < drafted and _close(p[0], p[1]):
            rank = x.rank[r * x.depth + d]
            if k.p_min > 0 or k.gated or (d <= greedy and d < length and (rank == 1 or rank == 2)):
                return True
        if k.gated and d < length and (
            _near(p[0], k.p1_max) or _near(p[1], k.p2_min) or _near(p[2], k.p3_min)
            or _close(p[1], p[2])
        ):
            return True
    return False


cdef inline void _note(Out *o, int nodes, int listed, int accepted) noexcept nogil:
    """Enters a verification of ``nodes`` drafted tokens; ``listed`` is what the loop reports as
    accepted, ``accepted`` what was."""
    if o.pairs != NULL:
        o.pairs[2 * o.verifications] = nodes
        o.pairs[2 * o.verifications + 1] = listed
    o.verifications += 1
    o.drafted += nodes
    o.accepted += listed
    o.rows[nodes + 1] += 1
    o.lengths[accepted] += 1


cdef int _unknown(const Text *x, Out *o) noexcept nogil:
    """The text ends before this verification does."""
    o.stop = STOP_NAN if x.stop_nan else STOP_TRACE
    if o.c != NULL:
        if x.stop_nan:
            o.c.invalid += 1
        else:
            o.c.unresolved += 1
    return 0


cdef int _chain(
    const Text *x, const Limits *lim, int r, const Rule *k, Out *o, int *sent, int *listed
) noexcept nogil:
    """Drafts a chain at root r and verifies it; returns by how many tokens the text grew.

    0: its outcome is not in the trace. ``o.stop`` says when the text has ended.
    """
    cdef Plan plan = _plan(x, lim, r, k.n_max, k.n_min)
    cdef const float *p_min_p = x.p_min_p + r * x.depth
    cdef const float *p
    cdef int d, drafted = plan.n_steps, stop = -1, steps, length, nodes, accepted, greedy, reached
    cdef int counted, whole, root = x.first + r * x.every
    cdef bint failed = False, dropped = False, side = False, ended, inside
    if k.p_min > 0 or x.gaps:
        for d in range(plan.n_steps):
            if x.gaps and isnan(x.p[(r * x.depth + d) * RANKS]):
                failed = True
                drafted = d
                break
            if k.p_min > 0 and p_min_p[d] < k.p_min:
                stop = d
                drafted = d
                break
    steps = drafted + (1 if stop >= 0 or failed else 0)
    dropped = drafted < k.n_min
    length = 0 if failed or dropped else min(drafted, plan.limit)
    accepted = greedy = min(<int>x.greedy[r], length)
    nodes = length
    if k.gated:
        for d in range(length):
            p = x.p + (r * x.depth + d) * RANKS
            if p[0] <= k.p1_max:
                if p[1] >= k.p2_min:
                    nodes += 1
                    side = side or (d == greedy and x.rank[r * x.depth + d] == 2)
                if p[2] >= k.p3_min:
                    nodes += 1
                    side = side or (d == greedy and x.rank[r * x.depth + d] == 3)
        if side:
            accepted += 1
    inside = root + accepted == x.eog
    ended = inside or root + accepted + 1 == x.eog
    whole = side or accepted == length
    if not inside and (
        (root + accepted + 1 >= x.tokens and not lim.uniform)
        or (not whole and x.rank[r * x.depth + accepted] == UNKNOWN)
    ):
        return _unknown(x, o)
    sent[0] = nodes
    listed[0] = accepted if whole or not inside else accepted - 1
    if o.near_tie < 0 and o.pairs != NULL and _chain_tie(
        x, r, k, steps, drafted, length, greedy, accepted
    ):
        o.near_tie = o.verifications
    _note(o, nodes, listed[0], accepted)
    o.widths[1] += steps
    if o.c != NULL:
        if failed:
            o.c.invalid += 1
        else:
            # what a draft holds after the end of the generation was never put to the question
            counted = accepted if inside else length
            reached = min(counted, greedy + 1)
            count_verification(o.c, counted, reached, accepted)
            for d in range(reached):
                _choice(
                    o.c, d, x.rank[r * x.depth + d], x.p + (r * x.depth + d) * RANKS,
                    x.top10[r * x.depth + d], p_min_p[d],
                )
            if dropped and drafted > 0:
                o.c.dropped_drafts += 1
                o.c.dropped_tokens += drafted
            else:
                o.c.cut_tokens += drafted - length
                if stop >= 0 and not inside:
                    count_stop(
                        o.c, stop, greedy == length, x.rank[r * x.depth + stop] == 1
                    )
                elif reached == accepted:
                    count_censored(
                        o.c, accepted,
                        REASON_END if inside else REASON_N_MAX if side else plan.reason,
                    )
    if ended:
        o.stop = STOP_EOG
        return accepted if inside else accepted + 1
    return accepted + 1


# A tree: node 0 is the root.
cdef struct Nodes:
    int32_t n               # nodes without the root
    int32_t depth
    int32_t trunk           # nodes with children on the all-rank-1 path, the root too
    int16_t[1024][9] child  # by rank 1..8, -1: none
    int16_t[1024] children
    int32_t[18] within      # nodes down to a depth
    int32_t[18] width       # nodes at a depth that have children


cdef class Shape:
    """A tree in the form that replays: ``paths`` are its nodes, parents before children."""

    cdef Nodes *t
    cdef readonly int n
    cdef readonly int depth

    def __cinit__(self, paths):
        cdef int at, d, rank, i
        self.t = <Nodes *>calloc(1, sizeof(Nodes))
        if self.t == NULL:
            raise MemoryError
        memset(self.t.child, 0xff, sizeof(self.t.child))
        depths = [0]
        for path in paths:
            at = 0
            *above, last = path
            for rank in above:
                at = self.t.child[at][rank]
            self.t.n += 1
            self.t.child[at][<int>last] = self.t.n
            self.t.children[at] += 1
            depths.append(len(path))
            self.t.depth = max(self.t.depth, len(path))
        for i in range(self.t.n + 1):
            if self.t.children[i]:
                self.t.width[depths[i]] += 1
            for d in range(depths[i], DEPTH + 1):
                self.t.within[d] += 1 if i else 0
        at = 0
        while at >= 0 and self.t.children[at]:
            self.t.trunk += 1
            at = self.t.child[at][1]
        self.n = self.t.n
        self.depth = self.t.depth

    def __dealloc__(self):
        free(self.t)


cdef inline void _forced(
    const Text *x, int r, int d, const float **p, double *top10, double *p_top10
) noexcept nogil:
    """The candidates on the forced path at depth d, all before it known."""
    cdef int64_t at = r * x.depth + d
    if d <= x.greedy[r]:
        p[0] = x.p + at * RANKS
        top10[0] = x.top10[at]
        p_top10[0] = x.p_min_p[at]
    else:
        at = x.off_at[r] + d - x.greedy[r] - 1
        p[0] = x.off_p + at * RANKS
        top10[0] = x.off_top10[at]
        p_top10[0] = -1.0


cdef inline bint _tree_tie(const Text *x, int r, int reached, int accepted) noexcept nogil:
    cdef int d, rank
    cdef const float *p = NULL
    cdef double top10, p_top10
    if _target_tie(x, r, accepted):
        return True
    for d in range(reached):
        rank = x.rank[r * x.depth + d]
        if rank == 0 or rank == UNKNOWN:
            break
        _forced(x, r, d, &p, &top10, &p_top10)
        if rank > 1 and _close(p[rank - 2], p[rank - 1]):
            return True
        if rank < RANKS and _close(p[rank - 1], p[rank]):
            return True
    return False


cdef int _branched(
    const Text *x, const Limits *lim, int r, Out *o, int nodes, int deepest, int accepted,
    int reached, bint leaf, bint failed, int reason, bint doubtful, int *sent, int *listed
) noexcept nogil:
    """Verifies ``nodes`` nodes, ``deepest`` deep; returns as ``_chain``.

    ``reached``: positions on the target's way that had nodes. ``leaf``: it ends where none follow,
    for this ``reason``. ``doubtful``: noise could have drafted others.
    """
    cdef int d, counted, root = x.first + r * x.every
    cdef bint inside = root + accepted == x.eog
    cdef bint ended = inside or root + accepted + 1 == x.eog
    cdef const float *p = NULL
    cdef double top10 = 0, p_top10 = 0
    if not inside and (
        (root + accepted + 1 >= x.tokens and not lim.uniform)
        or (not leaf and x.rank[r * x.depth + accepted] == UNKNOWN)
    ):
        return _unknown(x, o)
    sent[0] = nodes
    listed[0] = accepted if leaf or not inside else accepted - 1
    if inside:
        reached = accepted
    if o.near_tie < 0 and o.pairs != NULL and (doubtful or _tree_tie(x, r, reached, accepted)):
        o.near_tie = o.verifications
    _note(o, nodes, listed[0], accepted)
    if o.c != NULL:
        if failed:
            o.c.invalid += 1
        else:
            counted = accepted if inside else deepest
            count_verification(o.c, counted, reached, accepted)
            for d in range(reached):
                _forced(x, r, d, &p, &top10, &p_top10)
                _choice(o.c, d, x.rank[r * x.depth + d], p, top10, p_top10)
            if reached == accepted:
                count_censored(o.c, accepted, REASON_END if inside else reason)
    if ended:
        o.stop = STOP_EOG
        return accepted if inside else accepted + 1
    return accepted + 1


cdef int _tree(
    const Text *x, const Limits *lim, int r, const Nodes *t, Out *o, int *sent, int *listed
) noexcept nogil:
    """As ``_chain`` for a tree."""
    cdef Plan plan = _plan(x, lim, r, t.depth, 0)
    cdef int d, at = 0, accepted = 0, reached = 0, rank = 0, nodes, grew
    cdef int limit = plan.limit, steps = limit
    cdef bint failed = False
    if x.gaps:
        for d in range(min(limit, t.trunk)):
            if isnan(x.p[(r * x.depth + d) * RANKS]):
                failed = True
                steps = d + 1
                break
    nodes = 0 if failed else t.within[limit]
    while nodes and accepted < limit and t.children[at]:
        reached = accepted + 1
        rank = x.rank[r * x.depth + accepted]
        if rank == 0 or rank == UNKNOWN or t.child[at][rank] < 0:
            break
        at = t.child[at][rank]
        accepted += 1
    grew = _branched(
        x, lim, r, o, nodes, limit, accepted, reached,
        nodes == 0 or accepted == limit or not t.children[at], failed,
        plan.reason if t.children[at] else REASON_N_MAX, False, sent, listed
    )
    if grew:
        for d in range(steps):
            o.widths[1 if d == 0 else t.width[d]] += 1
    return grew


cdef inline bint _counts(const Text *x, const Limits *lim, int r) noexcept nogil:
    """Whether root r counts among uniform starts: everything below it is known."""
    cdef int64_t root = x.first + <int64_t>r * x.every
    if (x.blind and r == 0) or (lim.n_predict >= 0 and root - x.first > lim.n_predict):
        return False
    if x.eog >= 0:
        return root < x.eog
    return root + x.depth < x.tokens


cdef inline bint _may_go_on(const Text *x, const Limits *lim, int r, Out *o) noexcept nogil:
    """Whether a verification starts at root r, by the live loop's rules."""
    cdef int64_t n_ctx = _context(x, lim)
    if o.stop != GOING:
        return False
    if 0 <= lim.n_predict < r:
        o.stop = STOP_N_PREDICT
    elif n_ctx >= 0 and n_ctx - (x.first + r) - 1 < 0:
        o.stop = STOP_CONTEXT
    elif r >= x.roots:
        o.stop = STOP_NAN if x.stop_nan else STOP_TRACE
    return o.stop == GOING
