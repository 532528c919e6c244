"""C-level declarations of the core: the row kernel, the sampler, the counters, the stop flag."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from mtpstats._counts cimport Counters


cdef extern from "_kernel.h" nogil:
    enum:
        MTP_K
        MTP_SHOWN
    ctypedef struct mtp_row:
        int32_t[10] ids
        float[10] logits
        int32_t count
        int32_t padded
        int32_t has_lse
        int64_t n_bad
        double lse
        double lse_top10
    int mtp_isa_level
    int mtp_isa_usable(int level)
    void mtp_isa_set(int level)
    double mtp_exp(double x)
    double mtp_log(double x)
    double mtp_lse_top(const mtp_row *r)
    void mtp_read(mtp_row *r, const char *row, int64_t n, int64_t n_vocab, int with_lse)
    double mtp_overlap(const char *a, double a_lse, const char *b, double b_lse, int64_t n,
                       int clean)


cdef extern from "_stop.h" nogil:
    int mtp_stop_flag
    bint mtp_stop_asked(void *)


cdef extern from "_sampler.h" nogil:
    enum:
        MTP_LIST
    ctypedef struct mtp_sampler:
        double temp
        double top_p
        double min_logit
        int64_t top_k
        uint64_t seed
        double margin
        int64_t n_bad
    int32_t mtp_sample(mtp_sampler *s, const char *row, int64_t n, uint64_t position)
    double mtp_uniform(uint64_t seed, uint64_t position)
    void mtp_sampler_free(mtp_sampler *s)


# The head's candidates at one draft position, kept until the target's choice is known.
cdef struct Candidates:
    int32_t count
    int32_t[8] ids
    float[8] logits
    double lse
    double lse_top10


# A draft between draft() and its resolution.
cdef struct Pending:
    bint active
    int64_t n_past
    int32_t id_last
    int32_t seen            # positions whose candidates were given
    int32_t sent            # length of the verified draft; -1: not told
    int32_t stop            # position at which p_min ended the draft; -1: none
    int32_t reason          # index into CENSOR_REASONS, valid when sent >= 0
    bint dropped
    bint broken             # a row of the head had no finite logit
    int32_t replayed        # length of the draft sent again after a restore; -1: none
    int32_t replay_at       # where that first differs from what was sent
    int32_t replay_token    # the target's choice there
    int32_t depth           # of the tree whose accepted path was sent; -1: a chain
    bint leaf               # nothing of the tree followed that path
    Candidates[16] at
    int32_t[1024] tokens    # what was sent


cdef struct State:
    Counters total
    Pending pending


cdef class Row:
    cdef mtp_row row
    cdef int _need_lse(self) except -1
    cdef int _rank(self, int r) except -1
    cdef double _lse_top10(self) noexcept


cdef class Sampler:
    cdef mtp_sampler *_s


cdef class Collector:
    cdef State **_states    # open addressing by sequence id; NULL when off
    cdef int32_t *_ids      # the id in each slot, -1 when empty
    cdef int32_t _slots     # a power of two
    cdef int32_t _used
    cdef int32_t _n_max     # 0: not told
    cdef int64_t _every
    cdef int64_t _since     # verifications since the last report
    cdef object _sink
    cdef State *_find(self, int seq) except NULL
    cdef int _grow(self) except -1
    cdef Pending *_open(self, int seq, str call) except NULL
    cdef int _position(self, Pending *p, int seq, int position) except -1
    cdef int _store(self, State *s, const mtp_row *r) except -1
    cdef int _report(self) except -1
