"""Replay in compiled code: what a policy does at a root, and the loops over roots and texts.

A :class:`Store` points into the arrays of recorded prompts. A :class:`Run` replays one policy over
all of them and counts what a live collector would have counted, by the same code. A :class:`Walk`
is a run's way through one text for a policy that decides in Python. :class:`Paths` holds every
rank path of a trace as a trie, for the search of trees. ``mtpstats.replay`` has the rules.
"""

from libc.math cimport INFINITY, isnan
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

from mtpstats._counts cimport (
    RANKS, REASON_BUDGET, REASON_CONTEXT, REASON_END, REASON_N_MAX, Counters, count_censored,
    count_choice, count_stop, count_verification, units_of,
)

import numpy as np

from mtpstats.errors import InputError
from mtpstats.trace import NEAR_TIE

STOPS = ("n_predict", "eog", "context", "nan", "trace")

cdef enum:
    DEPTH = 16
    UNKNOWN = 255
    # why a text ends: indices into STOPS; GOING: it does not
    GOING = -1
    STOP_N_PREDICT = 0
    STOP_EOG = 1
    STOP_CONTEXT = 2
    STOP_NAN = 3
    STOP_TRACE = 4

# What another batch shape can do: to a margin of the target, to the ratio of two of the head's
# probabilities (logits 1e-2 apart), and to one of them (logits that move by 1e-3).
cdef double TARGET_TIE = NEAR_TIE
cdef float HEAD_RATIO = 1.010050167
cdef double NOISE = 5e-4


# One recorded text. Pointers go into the arrays of its TracedPrompt.
cdef struct Text:
    const uint8_t *rank
    const float *p
    const float *top10
    const float *p_min_p
    const float *off_p
    const float *off_top10
    const float *margin
    int32_t *off_at     # [roots] where each root's entries of off_p start
    uint8_t *greedy     # [roots] how many ranks are 1 before another
    int32_t roots
    int32_t depth
    int32_t every
    int32_t first       # position of root 0
    int32_t tokens
    int32_t eog         # position of the end-of-generation token, -1: none
    int32_t stop_nan    # the target had no logit for the token after the last
    int32_t blind       # no head at root 0: shared memory, position 0
    int32_t gaps        # somewhere the head had no candidate
    int32_t holes       # somewhere a rank is unknown though the text goes on
    int64_t n_ctx       # of the recording, when that ended the text; else -1


cdef struct Limits:
    int64_t n_predict   # -1: none
    int64_t n_ctx       # -1: the text's own
    bint uniform


cdef struct Plan:
    int32_t limit
    int32_t n_steps
    int32_t reason


cdef struct Rule:
    int32_t n_max
    int32_t n_min
    double p_min
    bint gated
    double p1_max
    double p2_min
    double p3_min


# What one text gave; the arrays are rows of the run's.
cdef struct Out:
    Counters *c         # NULL: not counted
    int32_t *pairs      # NULL: not kept; (drafted, accepted) of each verification
    int64_t tokens
    int64_t verifications
    int64_t drafted
    int64_t accepted
    int64_t steps_rows  # head rows of all steps
    int64_t near_tie    # -1: none
    int32_t stop
    int64_t *rows       # verifications by target rows
    int64_t *widths     # head steps by rows
    int64_t *lengths    # verifications by accepted length


cdef class Store:
    """Pointers into the arrays of prompts, which it keeps alive.

    Args:
        prompts: of one depth. every: positions between roots. shared: the head reads the target's
            cells.
    """

    cdef Text *texts
    cdef readonly int n
    cdef readonly int depth
    cdef readonly int64_t roots
    cdef list _keep

    def __cinit__(self, list prompts, int every, bint shared):
        cdef int i
        self.n = len(prompts)
        self.texts = <Text *>calloc(max(1, self.n), sizeof(Text))
        if self.texts == NULL:
            raise MemoryError
        self._keep = []
        for i in range(self.n):
            self._open(&self.texts[i], prompts[i], every, shared)
            self.roots += self.texts[i].roots
            self.depth = self.texts[i].depth

    cdef int _open(self, Text *x, object prompt, int every, bint shared) except -1:
        cdef const uint8_t[:, ::1] rank = prompt.rank
        cdef const float[:, :, ::1] p = prompt.p
        cdef const float[:, ::1] top10 = prompt.top10
        cdef const float[:, ::1] p_min_p = prompt.p_min_p
        cdef const float[:, ::1] off_p = prompt.off_p
        cdef const float[::1] off_top10 = prompt.off_top10
        cdef const float[::1] margin = prompt.margin
        cdef int32_t off = 0
        cdef int64_t r
        cdef int d
        self._keep.append(prompt)
        x.roots = <int32_t>rank.shape[0]
        x.depth = <int32_t>rank.shape[1]
        x.every = every
        x.first = prompt.n_prompt - 1
        x.tokens = len(prompt.tokens)
        x.eog = x.tokens - 1 if prompt.stop == "eog" else -1
        x.stop_nan = prompt.stop == "nan"
        x.blind = shared and x.first == 0
        x.n_ctx = prompt.n_ctx if prompt.stop == "context" else -1
        x.margin = &margin[0] if margin.shape[0] else NULL
        x.off_p = &off_p[0, 0] if off_p.shape[0] else NULL
        x.off_top10 = &off_top10[0] if off_top10.shape[0] else NULL
        x.off_at = <int32_t *>malloc((x.roots + 1) * sizeof(int32_t))
        x.greedy = <uint8_t *>malloc(x.roots + 1)
        if x.off_at == NULL or x.greedy == NULL:
            raise MemoryError
        if x.roots == 0:
            return 0
        x.rank = &rank[0, 0]
        x.p = &p[0, 0, 0]
        x.top10 = &top10[0, 0]
        x.p_min_p = &p_min_p[0, 0]
        for r in range(x.roots):
            d = 0
            while d < x.depth and x.rank[r * x.depth + d] == 1:
                d += 1
            x.greedy[r] = d
            x.off_at[r] = off
            d += 1
            while d < x.depth and x.rank[r * x.depth + d] != UNKNOWN:
                off += 1
                d += 1
            x.holes |= self._hole(x, r)
            for d in range(x.depth):
                if isnan(x.p[(r * x.depth + d) * RANKS]):
                    x.gaps = True
        return 0

    cdef bint _hole(self, const Text *x, int64_t r) noexcept nogil:
        cdef const uint8_t *rank = x.rank + r * x.depth
        cdef int d = 0
        while d < x.depth and rank[d] != 0 and rank[d] != UNKNOWN:
            d += 1
        return d < x.depth and rank[d] != 0 and x.first + r * x.every + 1 + d < x.tokens

    def __dealloc__(self):
        cdef int i
        if self.texts != NULL:
            for i in range(self.n):
                free(self.texts[i].off_at)
                free(self.texts[i].greedy)
        free(self.texts)


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
    plan.n_steps = max(n_max, n_min)
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
    dropped = not failed and plan.n_steps > 0 and drafted < k.n_min
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
    inside = x.eog >= 0 and accepted > 0 and root + accepted == x.eog
    ended = inside or (x.eog >= 0 and root + accepted + 1 == x.eog)
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
                if stop >= 0 and length == stop and not inside:
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
    int32_t trunk           # length of the all-rank-1 path
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
        at = self.t.child[0][1]
        while at >= 0:
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


cdef int _tree(
    const Text *x, const Limits *lim, int r, const Nodes *t, Out *o, int *sent, int *listed
) noexcept nogil:
    """As ``_chain`` for a tree."""
    cdef Plan plan = _plan(x, lim, r, t.depth, 0)
    cdef int d, at = 0, accepted = 0, reached = 0, rank = 0, nodes, counted
    cdef int limit = plan.limit, root = x.first + r * x.every
    cdef bint failed = False, inside, ended, leaf
    cdef const float *p = NULL
    cdef double top10 = 0, p_top10 = 0
    if x.gaps:
        for d in range(min(limit, max(t.trunk, 1))):
            failed = failed or isnan(x.p[(r * x.depth + d) * RANKS])
    nodes = 0 if failed else t.within[limit]
    while nodes and accepted < limit and t.children[at]:
        reached = accepted + 1
        rank = x.rank[r * x.depth + accepted]
        if rank == 0 or rank == UNKNOWN or t.child[at][rank] < 0:
            break
        at = t.child[at][rank]
        accepted += 1
    leaf = nodes == 0 or accepted == limit or not t.children[at]
    inside = x.eog >= 0 and accepted > 0 and root + accepted == x.eog
    ended = inside or (x.eog >= 0 and root + accepted + 1 == x.eog)
    if not inside and (
        (root + accepted + 1 >= x.tokens and not lim.uniform) or (not leaf and rank == UNKNOWN)
    ):
        return _unknown(x, o)
    sent[0] = nodes
    listed[0] = accepted if leaf or not inside else accepted - 1
    if inside:
        reached = accepted
    if o.near_tie < 0 and o.pairs != NULL and _tree_tie(x, r, reached, accepted):
        o.near_tie = o.verifications
    _note(o, nodes, listed[0], accepted)
    for d in range(1 if failed else limit):
        o.widths[1 if d == 0 else t.width[d]] += 1
    if o.c != NULL:
        if failed:
            o.c.invalid += 1
        else:
            counted = accepted if inside else limit
            count_verification(o.c, counted, reached, accepted)
            for d in range(reached):
                _forced(x, r, d, &p, &top10, &p_top10)
                _choice(o.c, d, x.rank[r * x.depth + d], p, top10, p_top10)
            if reached == accepted:
                count_censored(
                    o.c, accepted,
                    REASON_END if inside else plan.reason if t.children[at] else REASON_N_MAX,
                )
    if ended:
        o.stop = STOP_EOG
        return accepted if inside else accepted + 1
    return accepted + 1


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


# ---- whole texts


cdef class Run:
    """One policy over all texts of a store; call one of its methods once.

    Args:
        n_predict, n_ctx: as a live run's; -1: no limit, and each text's own.
        uniform: every root counts once, instead of those the policy starts at.
        n_nodes, width: most nodes of a draft, most head rows in a step.
        full: also count as a collector, list verifications and look for near ties.

    Arrays, int64 over prompts: ``tokens`` (generated), ``verifications``, ``drafted`` (nodes),
    ``accepted``, ``near_tie``, ``stop``; ``rows``, ``widths`` and ``lengths`` also by what they
    count. ``counters`` uint64[prompts, all counters] and ``pairs`` int32[verifications, 2] are
    None unless ``full``.
    """

    cdef Store store
    cdef Limits limits
    cdef Out *outs
    cdef bint full
    cdef readonly object tokens, verifications, drafted, accepted, near_tie, stop
    cdef readonly object rows, widths, lengths, counters, pairs
    cdef int32_t *_pairs
    cdef int64_t _n_pairs

    def __cinit__(self, Store store not None, int64_t n_predict, int64_t n_ctx, bint uniform,
                  int n_nodes, int width, bint full):
        cdef int i
        cdef int64_t[:, ::1] rows, widths, lengths
        cdef uint64_t[:, ::1] counters
        cdef int n = store.n
        self.store = store
        self.limits.n_predict = n_predict
        self.limits.n_ctx = n_ctx
        self.limits.uniform = uniform
        self.full = full
        self.outs = <Out *>calloc(max(1, n), sizeof(Out))
        if self.outs == NULL:
            raise MemoryError
        self.rows = np.zeros((n, n_nodes + 2), np.int64)
        self.widths = np.zeros((n, max(width, 1) + 1), np.int64)
        self.lengths = np.zeros((n, DEPTH + 1), np.int64)
        rows, widths, lengths = self.rows, self.widths, self.lengths
        if full:
            self.counters = np.zeros((n, sizeof(Counters) // sizeof(uint64_t)), np.uint64)
            counters = self.counters
            self._pairs = <int32_t *>malloc(2 * (store.roots + 1) * sizeof(int32_t))
            if self._pairs == NULL:
                raise MemoryError
        for i in range(n):
            self.outs[i].stop = GOING
            self.outs[i].near_tie = -1
            self.outs[i].rows = &rows[i, 0]
            self.outs[i].widths = &widths[i, 0]
            self.outs[i].lengths = &lengths[i, 0]
            if full:
                self.outs[i].c = <Counters *>&counters[i, 0]

    def __dealloc__(self):
        free(self.outs)
        free(self._pairs)

    cdef void _begin(self, int i) noexcept nogil:
        if self.full:
            self.outs[i].pairs = self._pairs + 2 * self._n_pairs

    cdef void _end(self, int i) noexcept nogil:
        self._n_pairs += self.outs[i].verifications

    cdef _finish(self):
        cdef int i
        cdef int32_t[:, ::1] pairs
        cdef int64_t j
        n = self.store.n
        table = np.empty((6, n), np.int64)
        for i in range(n):
            table[0, i] = self.outs[i].tokens
            table[1, i] = self.outs[i].verifications
            table[2, i] = self.outs[i].drafted
            table[3, i] = self.outs[i].accepted
            table[4, i] = self.outs[i].near_tie
            table[5, i] = self.outs[i].stop
        self.tokens, self.verifications, self.drafted, self.accepted = table[:4]
        self.near_tie, self.stop = table[4:]
        if self.full:
            self.pairs = np.empty((self._n_pairs, 2), np.int32)
            if self._n_pairs:
                pairs = self.pairs
                for j in range(self._n_pairs):
                    pairs[j, 0] = self._pairs[2 * j]
                    pairs[j, 1] = self._pairs[2 * j + 1]

    def chain(self, int n_max, double p_min, int n_min, gate=None):
        """A chain; ``gate``: (p1_max, p2_min, p3_min) of its siblings."""
        cdef Rule k
        cdef int i, r, sent, listed
        cdef Text *x
        cdef Out *o
        k.n_max = n_max
        k.n_min = n_min
        k.p_min = p_min
        k.gated = gate is not None
        k.p1_max, k.p2_min, k.p3_min = 0.0, INFINITY, INFINITY
        if gate is not None:
            k.p1_max, k.p2_min, k.p3_min = gate
        with nogil:
            for i in range(self.store.n):
                x = &self.store.texts[i]
                o = &self.outs[i]
                self._begin(i)
                if self.limits.uniform:
                    for r in range(x.roots):
                        if _counts(x, &self.limits, r):
                            o.tokens += _chain(x, &self.limits, r, &k, o, &sent, &listed)
                            o.stop = GOING
                else:
                    r = 0
                    while _may_go_on(x, &self.limits, r, o):
                        r += _chain(x, &self.limits, r, &k, o, &sent, &listed)
                    o.tokens = r
                self._end(i)
        self._finish()

    def tree(self, Shape shape not None):
        """A static tree."""
        cdef int i, r, sent, listed
        cdef Text *x
        cdef Out *o
        with nogil:
            for i in range(self.store.n):
                x = &self.store.texts[i]
                o = &self.outs[i]
                self._begin(i)
                if self.limits.uniform:
                    for r in range(x.roots):
                        if _counts(x, &self.limits, r):
                            o.tokens += _tree(x, &self.limits, r, shape.t, o, &sent, &listed)
                            o.stop = GOING
                else:
                    r = 0
                    while _may_go_on(x, &self.limits, r, o):
                        r += _tree(x, &self.limits, r, shape.t, o, &sent, &listed)
                    o.tokens = r
                self._end(i)
        self._finish()

    def adaptive(self, int low, int start, int n_max, int up, int down, double p_min):
        """A chain whose n_max follows the outcomes."""
        cdef Rule k
        cdef int i, r, sent, listed
        cdef Text *x
        cdef Out *o
        memset(&k, 0, sizeof(k))
        k.p_min = p_min
        with nogil:
            for i in range(self.store.n):
                x = &self.store.texts[i]
                o = &self.outs[i]
                self._begin(i)
                r = 0
                k.n_max = start
                while _may_go_on(x, &self.limits, r, o):
                    sent = listed = 0
                    r += _chain(x, &self.limits, r, &k, o, &sent, &listed)
                    if sent > 0:
                        if listed == sent:
                            k.n_max = min(k.n_max + up, n_max)
                        else:
                            k.n_max = max(k.n_max - down, low)
                o.tokens = r
                self._end(i)
        self._finish()

    def python(self, begin, draft, verified, shape_of):
        """A policy that decides in Python; see ``policy.Policy`` for the three calls.

        ``shape_of`` turns a tree into its :class:`Shape`.
        """
        cdef int i
        cdef Walk walk
        for i in range(self.store.n):
            self._begin(i)
            walk = Walk.__new__(Walk)
            walk.run, walk.x, walk.o = self, &self.store.texts[i], &self.outs[i]
            walk._prompt = self.store._keep[i]
            walk._drive(begin, draft, verified, shape_of)
            self._end(i)
        self._finish()


cdef class Walk:
    """What a policy in Python sees of a root; see ``policy.Root``."""

    cdef Run run
    cdef Text *x
    cdef Out *o
    cdef int r
    cdef object _prompt
    cdef readonly int limit

    @property
    def position(self):
        return self.x.first + self.r * self.x.every

    @property
    def depth(self):
        return self.x.depth

    @property
    def p(self):
        return self._prompt.p[self.r]

    @property
    def p_top10(self):
        return self._prompt.p_min_p[self.r]

    cdef _drive(self, begin, draft, verified, shape_of):
        cdef Limits *lim = &self.run.limits
        begin()
        self.r = 0
        if lim.uniform:
            for self.r in range(self.x.roots):
                if _counts(self.x, lim, self.r):
                    self.o.tokens += self._once(draft, verified, shape_of)
                    self.o.stop = GOING
            return
        while _may_go_on(self.x, lim, self.r, self.o):
            self.r += self._once(draft, verified, shape_of)
        self.o.tokens = self.r

    cdef int _once(self, draft, verified, shape_of) except -1:
        cdef Limits *lim = &self.run.limits
        cdef Plan plan = _plan(self.x, lim, self.r, self.x.depth, 0)
        cdef Rule k
        cdef Shape shape
        cdef int sent = 0, listed = 0, grown, n, steps = -1
        self.limit = plan.limit
        chosen = draft(self)
        if type(chosen) is tuple:
            if len(chosen) != 2:
                raise InputError(f"the policy drafted {chosen!r}: neither a length nor a tree, "
                                 "nor one of them and the head's steps")
            chosen, steps = chosen
            if steps < 0:
                raise InputError(f"the policy says that the head ran {steps} steps")
        if hasattr(chosen, "__index__"):
            if not 0 <= chosen <= self.x.depth:
                raise InputError(f"the policy drafted {chosen} tokens; the trace holds "
                                 f"{self.x.depth}")
            n = chosen
            memset(&k, 0, sizeof(k))
            k.n_max = n
            grown = _chain(self.x, lim, self.r, &k, self.o, &sent, &listed)
            n = min(n, plan.limit)
            if grown and steps >= 0:
                self.o.widths[1] += steps - n
        else:
            shape = shape_of(chosen)
            grown = _tree(self.x, lim, self.r, shape.t, self.o, &sent, &listed)
            n = min(shape.depth, plan.limit)
            if grown and steps > n:
                self.o.widths[1] += steps - n
        if grown:
            verified(sent, listed)
        return grown


# ---- every rank path of a trace


cdef class Paths:
    """The trie of all rank paths, and where each root's path ends in it.

    Node 0 is the root; a parent stands before its children. ``parent`` int32[n], ``rank`` and
    ``depth`` uint8[n]. The limits are those of :class:`Run`.
    """

    cdef Store store
    cdef Limits limits
    cdef int32_t *_end      # [roots of all texts] the deepest node of each root's path
    cdef uint8_t *_long     # [roots of all texts] how long that path is in the trace
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
        self._long = <uint8_t *>malloc(store.roots + 1)
        self._start = <int64_t *>malloc((store.n + 1) * sizeof(int64_t))
        child = <int32_t *>calloc(size * 9, sizeof(int32_t))
        if self._end == NULL or self._long == NULL or self._start == NULL or child == NULL:
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
        for place in range(store.roots):
            self._long[place] = self._depth[self._end[place]]

    def keep(self, const uint8_t[::1] kept not None):
        """Leave out the nodes that are 0 in ``kept`` (uint8[n]), with all below them.

        Paths then end at the last node that is left. Numbers of nodes change, their order does not.
        """
        cdef int at, n = 1
        cdef int64_t place
        cdef int32_t[::1] now = np.zeros(self.n, np.int32)
        for at in range(1, self.n):
            if kept[at] and (self._parent[at] == 0 or now[self._parent[at]]):
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
        free(self._long)
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
                        if accepted == 0 or root + accepted != x.eog:
                            break
                        o.stop = STOP_EOG
                        accepted -= 1
                    elif (
                        accepted == self._long[self._start[i] + r] and accepted < plan.limit
                        and inner[at] and x.rank[r * x.depth + accepted] == UNKNOWN
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
