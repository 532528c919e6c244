"""The core: best-k selection, softmax sums, the sampler, and the live counters.

A row is float32 logits, one per token id, in C order; it is read once and never copied. Only
finite logits take part (see ``_kernel.h``). Nothing here does I/O or formats for people.

Threads: a :class:`Row`, a :class:`Sampler` and a :class:`Collector` are not locked. Use one per
thread, or a lock of your own. Their methods hold the interpreter lock.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous,
    PyBuffer_Release, PyObject_GetBuffer,
)
from libc.math cimport INFINITY, isfinite
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

import sys

from mtpstats.errors import InputError

K = MTP_K
SHOWN = MTP_SHOWN
MAX_POSITIONS = 16
MAX_DRAFT = 1024
CENSOR_REASONS = ("n_max", "budget", "context", "end")
UNIT = 2.0**-24

cdef enum:
    POSITIONS = 16
    RANKS = 8
    DRAFT = 1024
    REASON_END = 3

cdef double ONE = 16777216.0  # 1 in units of 2**-24

# name and shape of each counter, in the order of struct Counters
LAYOUT = (
    ("drafted", (16,)), ("reached", (16,)), ("accepted", (16,)), ("rank", (16, 8)),
    ("miss", (16,)), ("stopped", (16,)), ("stopped_hit", (16,)), ("stopped_reached", (16,)),
    ("calib_p1", (16, 10, 2)), ("calib_p2", (16, 10, 2)), ("censored", (4, 16)),
    ("sum_p", (16, 8)), ("sum_p_top10", (16, 8)),
    ("verifications", ()), ("discarded", ()), ("unresolved", ()), ("invalid", ()),
    ("dropped_drafts", ()), ("dropped_tokens", ()), ("cut_tokens", ()),
    ("padded_rows", ()), ("nan_rows", ()),
    ("beyond_drafted", ()), ("beyond_reached", ()), ("beyond_accepted", ()),
)
STATE_BYTES = sizeof(State)

_ISA = ("baseline", "avx2", "avx512")


def isa():
    """Name of the instructions in use: ``"avx512"``, ``"avx2"`` or ``"baseline"``."""
    return _ISA[mtp_isa_level]


def force_isa(name=None):
    """Use other instructions, for tests and benchmarks; None: the best this machine has.

    Every choice gives identical bits. Raises InputError for one this machine cannot run.
    """
    if name is None:
        mtp_isa_set(2 if mtp_isa_usable(2) else 1 if mtp_isa_usable(1) else 0)
        return
    if name not in _ISA or not mtp_isa_usable(_ISA.index(name)):
        raise InputError(f"this machine has no instructions called {name!r}")
    mtp_isa_set(_ISA.index(name))


force_isa()


# ---- rows ---------------------------------------------------------------------------------

cdef int _view(object source, Py_buffer *view, bint writable, char code, str what) except -1:
    """Opens a one-dimensional contiguous buffer of 4-byte items of type ``code`` (f or i)."""
    cdef int flags = PyBUF_FORMAT | PyBUF_ND | PyBUF_STRIDES | (PyBUF_WRITABLE if writable else 0)
    cdef const char *f
    try:
        PyObject_GetBuffer(source, view, flags)
    except (TypeError, BufferError, ValueError) as e:
        raise InputError(f"{what} must be a {'writable ' if writable else ''}buffer, such as a "
                         f"numpy array, not {type(source).__name__}") from e
    f = view.format
    # numpy marks an unaligned array by "=" or "^"; a native order mark says nothing new
    if f != NULL and (f[0] in b"@=^" or f[0] == (60 if sys.byteorder == "little" else 62)):
        f += 1
    cdef bint right = (f != NULL and view.itemsize == 4 and f[1] == 0
                       and (f[0] == code or (code == 105 and f[0] == 108)))
    cdef bint shaped = right and view.ndim == 1 and PyBuffer_IsContiguous(view, b"C")
    if not shaped:
        form = "?" if view.format == NULL else (<bytes>view.format).decode("latin-1")
        ndim = view.ndim
        PyBuffer_Release(view)
        if right:
            raise InputError(f"{what} must be one contiguous row, not {ndim}-dimensional"
                             " or with gaps")
        raise InputError(f"{what} must hold {'float32' if code == 102 else 'int32'}, "
                         f"not items of format {form!r}")
    return 0


cdef int64_t _vocab(int64_t n, int64_t n_vocab) except -1:
    """Number of tokens in a row of n logits; a negative n_vocab means all of them."""
    if n < 0 or n > 0x7fffffff:
        raise InputError(f"a row cannot have {n} logits")
    if n_vocab > n:
        raise InputError(f"n_vocab {n_vocab} is more than the row's {n} logits")
    return n if n_vocab < 0 else n_vocab


cdef int _read_buffer(mtp_row *row, object source, int64_t n_vocab) except -1:
    cdef Py_buffer view
    cdef int64_t n
    _view(source, &view, False, 102, "logits")
    try:
        n = view.shape[0]
        mtp_read(row, <const char *>view.buf, n, _vocab(n, n_vocab), 1)
    finally:
        PyBuffer_Release(&view)
    return 0


cdef int _read_address(mtp_row *row, uint64_t address, int64_t n, int64_t n_vocab,
                       bint with_lse) except -1:
    n_vocab = _vocab(n, n_vocab)
    if address == 0:
        raise InputError("the address of the logits is NULL")
    mtp_read(row, <const char *><size_t>address, n, n_vocab, with_lse)
    return 0


def top_k(row, n_vocab=None, out=None):
    """The 10 best logits of a row, and its log-sum-exp.

    Args:
        row: float32[n], any contiguous buffer, aligned or not; it is not copied.
        n_vocab: tokens in the vocabulary; entries from there on are padding and take no part.
            None: all n.
        out: (ids, logits) to fill, writable int32[10] and float32[10], instead of new arrays.

    Returns:
        (ids, logits, lse, lse_top10): int32[10] and float32[10], best first, equal logits by
        ascending id, -1 and -inf where the row has fewer finite entries; log-sum-exp over the
        vocabulary and over the 10, natural logarithm (-inf when nothing is finite).

    Raises:
        InputError: not such a row, or n_vocab above n.

    >>> top_k(numpy.float32([1, 3, 3, 2]))[0][:4]
    array([1, 2, 3, 0], dtype=int32)
    """
    cdef mtp_row r
    cdef Py_buffer a, b
    cdef Py_buffer view
    cdef int64_t n, tokens
    if out is None:
        import numpy
        out = (numpy.empty(MTP_K, numpy.int32), numpy.empty(MTP_K, numpy.float32))
    try:
        ids, logits = out
    except (TypeError, ValueError):
        raise InputError("out must be a pair (ids, logits)") from None
    tokens = -1 if n_vocab is None else n_vocab
    if n_vocab is not None and tokens < 0:
        raise InputError(f"n_vocab cannot be {n_vocab}")
    _view(ids, &a, True, 105, "out ids")
    try:
        _view(logits, &b, True, 102, "out logits")
        try:
            if a.shape[0] != MTP_K or b.shape[0] != MTP_K:
                raise InputError(f"out must hold {MTP_K} ids and {MTP_K} logits")
            _view(row, &view, False, 102, "row")
            try:
                n = view.shape[0]
                tokens = _vocab(n, tokens)
                with nogil:
                    mtp_read(&r, <const char *>view.buf, n, tokens, 1)
            finally:
                PyBuffer_Release(&view)
            memcpy(a.buf, r.ids, sizeof(r.ids))
            memcpy(b.buf, r.logits, sizeof(r.logits))
        finally:
            PyBuffer_Release(&b)
    finally:
        PyBuffer_Release(&a)
    return ids, logits, r.lse, r.lse_top10


cdef double _share(float logit, double lse) noexcept nogil:
    """exp(logit - lse), at most 1: the sum's last bits may be too low."""
    cdef double p = mtp_exp(<double>logit - lse)
    return p if p < 1.0 else 1.0


cdef class Row:
    """What one pass over a row of logits gives; reused for row after row without allocating.

    Ranks count from 1. Before the first read the row is empty.
    """

    def __cinit__(self):
        mtp_read(&self.row, NULL, 0, 0, 1)

    def read(self, buffer, int64_t n_vocab=-1):
        """Read float32[n]: the 10 best and both log-sum-exps. See :func:`top_k` for errors."""
        _read_buffer(&self.row, buffer, n_vocab)

    def read_at(self, uint64_t address, int64_t n, int64_t n_vocab=-1):
        """The same for n float32 at an address, which need not be aligned.

        The caller vouches for the memory: a wrong address crashes the process.
        """
        _read_address(&self.row, address, n, n_vocab, True)

    def best_at(self, uint64_t address, int64_t n, int64_t n_vocab=-1):
        """The 10 best only, without the full-vocabulary log-sum-exp: ``p`` and ``prob`` raise."""
        _read_address(&self.row, address, n, n_vocab, False)

    cdef int _need_lse(self) except -1:
        if not self.row.has_lse:
            raise InputError("best_at() reads no full softmax; use read_at()")
        return 0

    cdef int _rank(self, int r) except -1:
        if r < 1 or r > MTP_K:
            raise InputError(f"rank {r} is outside 1..{MTP_K}")
        return r - 1

    @property
    def best(self):
        """Id of the best token, -1 if no logit is finite."""
        return self.row.ids[0]

    @property
    def margin(self):
        """Gap between the two best logits; inf if there is only one, 0 if none."""
        if self.row.count == 0:
            return 0.0
        return <double>self.row.logits[0] - <double>self.row.logits[1]

    @property
    def p(self):
        """Probability of the best token under the full softmax; 0 if there is none."""
        self._need_lse()
        return _share(self.row.logits[0], self.row.lse) if self.row.count else 0.0

    @property
    def p_top10(self):
        """Probability of the best token under a softmax over the 10 best; 0 if there is none."""
        return _share(self.row.logits[0], self.row.lse_top10) if self.row.count else 0.0

    @property
    def lse(self):
        """Log-sum-exp over the vocabulary, natural logarithm."""
        self._need_lse()
        return self.row.lse

    @property
    def lse_top10(self):
        """Log-sum-exp over the 10 best."""
        return self.row.lse_top10

    @property
    def n_nan(self):
        """How many logits of the vocabulary are NaN or +inf."""
        return self.row.n_bad

    @property
    def padded(self):
        """Whether a padding entry beats every token of the vocabulary."""
        return self.row.padded != 0

    def id(self, int r):
        """Token id at rank r (1..10), -1 if there is none."""
        return self.row.ids[self._rank(r)]

    def logit(self, int r):
        """Logit at rank r (1..10), -inf if there is none."""
        return self.row.logits[self._rank(r)]

    def prob(self, int r):
        """Probability at rank r (1..10) under the full softmax, 0 if there is none."""
        self._need_lse()
        r = self._rank(r)
        return _share(self.row.logits[r], self.row.lse) if r < self.row.count else 0.0

    def prob_top10(self, int r):
        """Probability at rank r (1..10) under a softmax over the 10 best, 0 if there is none."""
        r = self._rank(r)
        return _share(self.row.logits[r], self.row.lse_top10) if r < self.row.count else 0.0

    def rank_of(self, int token):
        """Rank 1..8 of a token among the candidates, 0 for a miss."""
        cdef int r
        if token >= 0:
            for r in range(MTP_SHOWN):
                if self.row.ids[r] == token:
                    return r + 1
        return 0


cdef class Sampler:
    """Draws the target's token: top_k, then top_p, then min_p, then temperature, as llama.cpp.

    The random number of a draw depends on (seed, position) only, so the text does not depend on
    how it was drafted. Ties stand by ascending id.

    Args:
        temp: 0 or less takes the best token and ignores the rest.
        top_k: 0 or less: the whole vocabulary. Up to 256 no memory is allocated; above that, or
            for the whole vocabulary, 16 bytes a token at the first call.
        top_p: 1 or more: off. min_p: 0 or less: off.
        seed: 0..2**64 - 1.

    Raises:
        InputError: a setting that is not a number.
    """

    def __cinit__(self, double temp, int64_t top_k, double top_p, double min_p, uint64_t seed):
        if not (isfinite(temp) and isfinite(top_p) and isfinite(min_p)):
            raise InputError("temp, top_p and min_p must be finite numbers")
        self._s = <mtp_sampler *>calloc(1, sizeof(mtp_sampler))
        if self._s == NULL:
            raise MemoryError
        self._s.temp = temp
        self._s.top_k = top_k if top_k > 0 else 0
        self._s.top_p = top_p
        self._s.min_logit = mtp_log(min_p) if min_p > 1e-300 else -INFINITY
        self._s.seed = seed

    def __dealloc__(self):
        if self._s != NULL:
            mtp_sampler_free(self._s)
            free(self._s)

    def sample_at(self, uint64_t address, int64_t n, uint64_t position, int64_t n_vocab=-1):
        """Draw from n float32 logits at an address for the token at a text position.

        Returns the token id, -1 when no logit is finite. The caller vouches for the memory.
        """
        cdef int32_t token
        n_vocab = _vocab(n, n_vocab)
        if address == 0:
            raise InputError("the address of the logits is NULL")
        token = mtp_sample(self._s, <const char *><size_t>address, n_vocab, position)
        if token == -2:
            raise MemoryError
        return token

    @property
    def margin(self):
        """Of the last call: how far the choice was from another one.

        Greedy: the gap between the two best logits (inf if there is only one). Sampled: the
        distance of the draw to the nearest edge of the chosen token's interval of [0, 1].
        0 when there was no token.
        """
        return self._s.margin

    @property
    def n_nan(self):
        """Of the last call: how many logits were NaN or +inf."""
        return self._s.n_bad


def uniform(uint64_t seed, uint64_t position):
    """The sampler's random number in [0, 1) for a (seed, position)."""
    return mtp_uniform(seed, position)


# ---- counters -----------------------------------------------------------------------------

cdef uint64_t _units(float logit, double lse) noexcept nogil:
    """A probability in units of 2**-24, rounded to nearest."""
    return <uint64_t>(_share(logit, lse) * ONE + 0.5)


cdef int32_t _token(const Pending *p, int i) noexcept nogil:
    """Draft token i as the target saw it, -1 if unknown."""
    if p.sent >= 0:
        return p.tokens[i] if i < p.sent else -1
    if i < POSITIONS and i < p.seen and p.at[i].count > 0:
        return p.at[i].ids[0]
    return -1


cdef void _calibrate(uint64_t[10][2] *bins, uint64_t units, bint hit) noexcept nogil:
    cdef uint64_t b = units * 10 >> 24
    if b > 9:
        b = 9
    bins[0][b][0] += 1
    if hit:
        bins[0][b][1] += 1


cdef void _count_reached(Counters *c, const Candidates *a, int i, int32_t choice) noexcept nogil:
    """Adds the target's choice at a reached position to the ranks, sums and deciles."""
    cdef int r, found = -1
    cdef uint64_t units
    for r in range(a.count):
        if a.ids[r] == choice:
            found = r
        units = _units(a.logits[r], a.lse)
        c.sum_p[i][r] += units
        c.sum_p_top10[i][r] += _units(a.logits[r], a.lse_top10)
        if r == 0:
            _calibrate(&c.calib_p1[i], units, a.ids[r] == choice)
        elif r == 1:
            _calibrate(&c.calib_p2[i], units, a.ids[r] == choice)
    if found < 0:
        c.miss[i] += 1
    else:
        c.rank[i][found] += 1


cdef bint _resolve(State *s, int64_t n_past, int32_t id_last) noexcept nogil:
    """Closes the pending draft by the next call's position and token; True if it was verified."""
    cdef Pending *p = &s.pending
    cdef Counters *c = &s.total
    cdef int i, length, planned
    cdef int64_t accepted = n_past - p.n_past - 1
    cdef bint ended = False
    p.active = False
    if p.broken:
        c.invalid += 1
        return False
    planned = 0 if p.dropped else p.seen - (1 if p.stop >= 0 else 0)
    length = planned if p.sent < 0 else p.sent
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
    if accepted < length and _token(p, <int>accepted) == id_last:
        # generation ended inside the accepted prefix: what the draft held after it was never
        # put to the question
        accepted += 1
        length = <int>accepted
        ended = True
    c.verifications += 1
    for i in range(min(length, <int>POSITIONS)):
        c.drafted[i] += 1
        if i <= accepted:
            c.reached[i] += 1
            if i < accepted:
                c.accepted[i] += 1
            _count_reached(c, &p.at[i], i, _token(p, i) if i < accepted else id_last)
    if length > POSITIONS:
        c.beyond_drafted += length - POSITIONS
        c.beyond_reached += max(0, min(length, <int>accepted + 1) - <int>POSITIONS)
        c.beyond_accepted += max(0, <int>accepted - <int>POSITIONS)
    if p.dropped:
        return True
    if p.stop >= 0 and length == p.stop and not ended:
        if length < POSITIONS:
            c.stopped[length] += 1
            if accepted == length:
                c.stopped_reached[length] += 1
                if p.at[length].count > 0 and p.at[length].ids[0] == id_last:
                    c.stopped_hit[length] += 1
    elif accepted == length and length < POSITIONS and (length > 0 or p.sent >= 0):
        c.censored[REASON_END if ended else p.reason][length] += 1
    return True


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
        cdef Pending *p
        cdef int32_t[1024] sent
        cdef int i, n, planned
        if self._states == NULL:
            return
        p = self._open(seq, "verify()")
        n = _tokens(tokens, sent)
        if reason not in CENSOR_REASONS:
            raise InputError(f"verify(): reason {reason!r} is none of {', '.join(CENSOR_REASONS)}")
        if p.sent >= 0:
            _replay(p, sent, n)
            return
        planned = 0 if p.dropped else p.seen - (1 if p.stop >= 0 else 0)
        if n > planned:
            raise InputError(f"verify(): {n} tokens sent, but candidates were given for a draft "
                             f"of {planned}")
        p.sent = n
        p.reason = CENSOR_REASONS.index(reason)
        memcpy(p.tokens, sent, n * sizeof(int32_t))
        self._find(seq).total.cut_tokens += planned - n

    def drop(self, int seq):
        """The draft was thrown away (``n_min``); the target decodes ``id_last`` alone."""
        cdef Pending *p
        cdef int planned
        if self._states == NULL:
            return
        p = self._open(seq, "drop()")
        if p.sent >= 0 or p.dropped:
            raise InputError(f"drop(): the draft of sequence {seq} is already closed")
        planned = p.seen - (1 if p.stop >= 0 else 0)
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
        if self._states == NULL:
            return
        if (n_past is None) != (id_last is None):
            raise InputError("finish(): give both n_past and id_last, or neither")
        s = self._find(seq)
        if not s.pending.active:
            return
        if n_past is None:
            _abandon(s)
        elif n_past < 0:
            raise InputError(f"finish(): n_past cannot be {n_past}")
        elif _resolve(s, n_past, id_last):
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
