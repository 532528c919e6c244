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
from libc.math cimport INFINITY, NAN, isfinite
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from mtpstats._counts cimport (
    POSITIONS, RANKS, REASON_END, count_censored, count_choice, count_stop, count_verification,
    units_of,
)

import sys

from mtpstats.errors import InputError

K = MTP_K
SHOWN = MTP_SHOWN
MAX_POSITIONS = 16
MAX_DRAFT = 1024
CENSOR_REASONS = ("n_max", "budget", "context", "end")
UNIT = 2.0**-24

cdef enum:
    DRAFT = 1024

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


def copy(size_t to, size_t source, size_t n_bytes):
    """Copy memory from address to address; neither is checked. A tenth of ``ctypes.memmove``."""
    memcpy(<void *> to, <void *> source, n_bytes)


def stop(bint asked):
    """Ask all that calls what ``stop_address`` points to to stop; False takes it back."""
    global mtp_stop_flag
    mtp_stop_flag = asked


def stop_asked():
    """Whether a stop was asked for."""
    return mtp_stop_flag != 0


def stop_address():
    """Address of a C function ``bool (*)(void *)`` that returns whether a stop was asked for.

    It may be called on any thread and does no more than read one integer.
    """
    return <size_t> <void *> &mtp_stop_asked


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
        vocabulary, to 1e-6, and over the 10, natural logarithm; -inf when nothing is finite.

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

    cdef double _lse_top10(self) noexcept:
        return self.row.lse_top10 if self.row.has_lse else mtp_lse_top(&self.row)

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
        return _share(self.row.logits[0], self._lse_top10()) if self.row.count else 0.0

    @property
    def lse(self):
        """Log-sum-exp over the vocabulary, natural logarithm."""
        self._need_lse()
        return self.row.lse

    @property
    def lse_top10(self):
        """Log-sum-exp over the 10 best."""
        return self._lse_top10()

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
        return _share(self.row.logits[r], self._lse_top10()) if r < self.row.count else 0.0

    def fill(self, uint64_t address):
        """Write float32[10] at an address: what a recording keeps of the row.

        The probability at ranks 1..8 in units of 2**-24, as live counters add it up, NaN where
        there is no candidate; the probability of the 10 best together; ``p_top10``. All NaN if no
        logit is finite. The caller vouches for the memory.
        """
        cdef float[10] out
        cdef int r
        self._need_lse()
        if address == 0:
            raise InputError("the address to write to is NULL")
        for r in range(MTP_SHOWN):
            out[r] = NAN
            if r < self.row.count:
                out[r] = <float>(<double>units_of(_share(self.row.logits[r], self.row.lse))
                                 / 16777216.0)
        out[8] = out[9] = NAN
        if self.row.count:
            out[8] = <float>min(mtp_exp(self.row.lse_top10 - self.row.lse), 1.0)
            out[9] = <float>_share(self.row.logits[0], self.row.lse_top10)
        memcpy(<void *><size_t>address, &out[0], sizeof(out))

    def rank_of(self, int token):
        """Rank 1..8 of a token among the candidates, 0 for a miss."""
        cdef int r
        if token >= 0:
            for r in range(MTP_SHOWN):
                if self.row.ids[r] == token:
                    return r + 1
        return 0


def overlap_at(uint64_t a, double a_lse, uint64_t b, double b_lse, int64_t n, bint clean=False):
    """Sum over tokens of min(softmax(a), softmax(b)) of two rows of n float32 logits at addresses.

    The lse are the rows' log-sum-exps. An entry that is NaN or +inf in either row is left out;
    ``clean`` says that there is none, which is faster. NaN for a row without a finite logit. The
    caller vouches for the memory.
    """
    if a == 0 or b == 0:
        raise InputError("the address of the logits is NULL")
    if not (isfinite(a_lse) and isfinite(b_lse)):
        return NAN
    return mtp_overlap(<const char *><size_t>a, a_lse, <const char *><size_t>b, b_lse,
                       _vocab(n, -1), clean)


cdef class Sampler:
    """Draws the target's token: top_k, then top_p, then min_p, then temperature, as llama.cpp.

    The random number of a draw depends on (seed, position) only, so the text does not depend on
    how it was drafted. Ties stand by ascending id.

    Args:
        temp: 0 or less takes the best token and ignores the rest.
        top_k: 0 or less: the whole vocabulary. Up to 256 no memory is allocated; above that, or
            for the whole vocabulary, 24 bytes a token at the first call.
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


include "_counters.pxi"
