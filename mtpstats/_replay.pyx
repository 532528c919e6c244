"""Replay in compiled code: what a policy does at a root, and the loops over roots and texts.

A :class:`Store` points into the arrays of recorded prompts. A :class:`Run` replays one policy over
all of them and counts what a live collector would have counted, by the same code. A :class:`Walk`
is a run's way through one text for a policy that decides in Python. :class:`Paths` holds every
rank path of a trace as a trie, for the search of trees. ``mtpstats.replay`` has the rules.
"""

from libc.math cimport isnan
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
    const uint8_t *beam_node    # depth, parent, rank of each node; NULL: no width
    const float *beam_p
    int32_t *beam_at    # [roots] where each root's nodes start
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
        cdef const uint8_t[:, ::1] beam_node = prompt.beam_node
        cdef const float[:, ::1] beam_p = prompt.beam_p
        cdef int64_t at
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
        if prompt.width:
            x.beam_node, x.beam_p = &beam_node[0, 0], &beam_p[0, 0]
            x.beam_at = <int32_t *>malloc((x.roots + 1) * sizeof(int32_t))
            if x.beam_at == NULL:
                raise MemoryError
            r = 0
            for at in range(beam_node.shape[0]):
                if beam_node[at, 0] == 0:
                    x.beam_at[r] = <int32_t>at
                    r += 1
        return 0

    cdef bint _hole(self, const Text *x, int64_t r) noexcept nogil:
        # Where the text ends there is none, or no text had roots that are easy to replay.
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
                free(self.texts[i].beam_at)
        free(self.texts)


include "_verify.pxi"
include "_grown.pxi"


cdef struct Fixed:
    # A policy that does the same whatever came before: the one of these that is not NULL.
    const Rule *rule
    const Nodes *tree
    const Growth *growth
    Grown *grown  # room for a growth


cdef inline int _verified(
    const Fixed *p, const Text *x, const Limits *lim, int r, Out *o
) noexcept nogil:
    """As ``_chain``, ``_tree`` or ``_grown``."""
    cdef int sent, listed
    if p.rule != NULL:
        return _chain(x, lim, r, p.rule, o, &sent, &listed)
    if p.tree != NULL:
        return _tree(x, lim, r, p.tree, o, &sent, &listed)
    return _grown(x, lim, r, p.growth, p.grown, o, &sent, &listed)


# ---- whole texts


cdef class Run:
    """One policy over all texts of a store; call one of its methods once.

    Args:
        n_predict, n_ctx: as a live run's; -1: no limit, and each text's own.
        uniform: every root counts once, instead of those the policy starts at.
        n_nodes, width: most nodes of a draft, most head rows in a step.
        full: also count as a collector, list verifications and look for near ties.

    Arrays, int64 over prompts: ``tokens`` (generated), ``verifications``, ``drafted`` (nodes),
    ``accepted``, ``near_tie``, ``stop`` (says nothing if uniform); ``rows``, ``widths`` and
    ``lengths`` also by what they count. ``counters`` uint64[prompts, all counters] and ``pairs``
    int32[verifications, 2] are None unless ``full``.
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

    cdef _go(self, const Fixed *p):
        """Go through every text with a policy that does the same whatever came before."""
        cdef int i, r
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
                            o.tokens += _verified(p, x, &self.limits, r, o)
                else:
                    r = 0
                    while _may_go_on(x, &self.limits, r, o):
                        r += _verified(p, x, &self.limits, r, o)
                    o.tokens = r
                self._end(i)
        self._finish()

    def chain(self, int n_max, double p_min, int n_min, gate=None):
        """A chain; ``gate``: (p1_max, p2_min, p3_min) of its siblings."""
        cdef Rule k
        cdef Fixed p
        memset(&k, 0, sizeof(k))
        k.n_max = n_max
        k.n_min = n_min
        k.p_min = p_min
        k.gated = gate is not None
        if gate is not None:
            k.p1_max, k.p2_min, k.p3_min = gate
        memset(&p, 0, sizeof(p))
        p.rule = &k
        self._go(&p)

    def tree(self, Shape shape not None):
        """A static tree."""
        cdef Fixed p
        memset(&p, 0, sizeof(p))
        p.tree = shape.t
        self._go(&p)

    def grown(self, int n_nodes, int depth, int width, int ranks, delta):
        """A tree grown at every root, as ``policy.OptTree`` says, or without a delta ``Eagle2``.

        ``ranks``: candidates of a node that count. The prompts must have beams of the width.
        """
        cdef Growth k
        cdef Fixed p
        k.n_nodes, k.depth, k.width, k.ranks = n_nodes, depth, width, ranks
        k.eager = delta is not None
        k.delta = delta if k.eager else 0.0
        memset(&p, 0, sizeof(p))
        p.grown = <Grown *>malloc(sizeof(Grown))
        if p.grown == NULL:
            raise MemoryError
        p.growth = &k
        try:
            self._go(&p)
        finally:
            free(p.grown)

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


include "_walk.pxi"
include "_paths.pxi"
