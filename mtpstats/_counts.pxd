"""The counters, and what a verification does to them: live and in replay, the same code."""

from libc.stdint cimport int32_t, int64_t, uint64_t


cdef enum:
    POSITIONS = 16
    RANKS = 8
    REASON_N_MAX = 0
    REASON_BUDGET = 1
    REASON_CONTEXT = 2
    REASON_END = 3


# The counters of one sequence, all uint64; LAYOUT in _core.pyx names them for Python in this
# order. Sums of probabilities are in units of 2**-24, so that adding them is exact.
cdef struct Counters:
    uint64_t[16] drafted
    uint64_t[16] reached
    uint64_t[16] accepted
    uint64_t[16][8] rank
    uint64_t[16] miss
    uint64_t[16] stopped
    uint64_t[16] stopped_hit
    uint64_t[16] stopped_reached
    uint64_t[16][10][2] calib_p1
    uint64_t[16][10][2] calib_p2
    uint64_t[4][16] censored
    uint64_t[16][8] sum_p
    uint64_t[16][8] sum_p_top10
    uint64_t verifications
    uint64_t discarded
    uint64_t unresolved
    uint64_t invalid
    uint64_t dropped_drafts
    uint64_t dropped_tokens
    uint64_t cut_tokens
    uint64_t padded_rows
    uint64_t nan_rows
    uint64_t beyond_drafted
    uint64_t beyond_reached
    uint64_t beyond_accepted


cdef inline uint64_t units_of(double p) noexcept nogil:
    """A probability in units of 2**-24, rounded to nearest."""
    return <uint64_t><int32_t>(p * 16777216.0 + 0.5)


cdef inline void count_verification(
    Counters *c, int64_t length, int64_t reached, int64_t accepted
) noexcept nogil:
    """A resolved draft of ``length`` positions, of which the first ``reached`` were put to the
    question."""
    cdef int64_t i
    c.verifications += 1
    for i in range(min(length, <int64_t>POSITIONS)):
        c.drafted[i] += 1
        if i < reached:
            c.reached[i] += 1
        if i < accepted:
            c.accepted[i] += 1
    if length > POSITIONS:
        c.beyond_drafted += length - POSITIONS
        c.beyond_reached += max(<int64_t>0, reached - POSITIONS)
        c.beyond_accepted += max(<int64_t>0, accepted - POSITIONS)


cdef inline void count_decile(uint64_t[10][2] *bins, uint64_t units, bint hit) noexcept nogil:
    cdef uint64_t b = units * 10 >> 24
    if b > 9:
        b = 9
    bins[0][b][0] += 1
    if hit:
        bins[0][b][1] += 1


cdef inline void count_choice(
    Counters *c, int i, int rank, int n, const uint64_t *p, const uint64_t *p_top10
) noexcept nogil:
    """The target's choice at a reached position: its rank from 1, 0 for a miss.

    ``p`` and ``p_top10`` are the units of the n candidates.
    """
    cdef int r
    for r in range(n):
        c.sum_p[i][r] += p[r]
        c.sum_p_top10[i][r] += p_top10[r]
    if n > 0:
        count_decile(&c.calib_p1[i], p[0], rank == 1)
    if n > 1:
        count_decile(&c.calib_p2[i], p[1], rank == 2)
    if rank > 0:
        c.rank[i][rank - 1] += 1
    else:
        c.miss[i] += 1


cdef inline void count_stop(Counters *c, int64_t i, bint reached, bint hit) noexcept nogil:
    """A draft that p_min ended at position i; ``hit``: its candidate there was right."""
    if i < POSITIONS:
        c.stopped[i] += 1
        if reached:
            c.stopped_reached[i] += 1
            if hit:
                c.stopped_hit[i] += 1


cdef inline void count_censored(Counters *c, int64_t length, int reason) noexcept nogil:
    """A wholly accepted draft of this length."""
    if length < POSITIONS:
        c.censored[reason][length] += 1
