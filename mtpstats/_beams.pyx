"""Beams: which nodes below a root a recording expands, a depth at a time.

The beam of width w holds, at each depth, the w nodes of greatest cumulative probability whose
parents are in the beam of the depth before; equals go by the lower rank path. A narrower beam is
*not* part of a wider one: the children of the node that only the wider one has can push out those
that the narrower one goes on with. So a recording of width W expands what any beam of width 1..W
holds. It follows that a tree grown by cumulative probability, whose layers expand at most w <= W
nodes, finds in the trace all that it asks the head.

Cumulative probabilities are products, from the root down, of what a trace holds, in double
precision. A layer is in the order of rank paths.
"""

from libc.math cimport isnan
from libc.stdint cimport uint8_t, uint16_t
from libc.string cimport memset

cdef enum:
    RANKS = 8
    WIDEST = 16
    LAYER = 136     # nodes of a depth: 1 + 2 + ... + 16

MAX_WIDTH = WIDEST


# The nodes of one depth.
cdef struct Layer:
    int n
    double[136] value       # cumulative probability
    uint16_t[136] beams     # bit w - 1: in the beam of width w
    uint8_t[136] parent     # index in the layer before
    uint8_t[136] rank


cdef inline void _root(Layer *x) noexcept nogil:
    x.n = 1
    x.value[0] = 1.0
    x.beams[0] = 0xffff
    x.parent[0] = x.rank[0] = 0


cdef void _grow(
    const Layer *x, int width, const float *p, Py_ssize_t stride, Layer *below
) noexcept nogil:
    """The next depth. ``p``: rows of the layer's candidates, best first, NaN where there are fewer,
    ``stride`` floats apart."""
    cdef uint16_t[136][8] marks
    cdef double[16] best
    cdef int[16] cell
    cdef double value
    cdef int w, i, r, j, count
    memset(marks, 0, x.n * RANKS * sizeof(uint16_t))
    for w in range(1, width + 1):
        count = 0
        for i in range(x.n):
            if not (x.beams[i] >> (w - 1)) & 1:
                continue
            for r in range(RANKS):      # of w siblings and more, those that follow are no better
                value = x.value[i] * p[i * stride + r]
                if isnan(value) or (count == w and value <= best[w - 1]):
                    break
                j = count if count < w else w - 1
                while j > 0 and best[j - 1] < value:
                    best[j], cell[j] = best[j - 1], cell[j - 1]
                    j -= 1
                best[j], cell[j] = value, i * RANKS + r
                count = min(count + 1, w)
        for j in range(count):
            marks[cell[j] // RANKS][cell[j] % RANKS] |= <uint16_t>(1 << (w - 1))
    below.n = 0
    for i in range(x.n):
        for r in range(RANKS):
            if marks[i][r]:
                below.value[below.n] = x.value[i] * p[i * stride + r]
                below.beams[below.n] = marks[i][r]
                below.parent[below.n] = <uint8_t>i
                below.rank[below.n] = <uint8_t>(r + 1)
                below.n += 1


cdef class Beams:
    """The layers below one root, while they are recorded.

    Args:
        width: W, 1..16.
    """

    cdef Layer x
    cdef int width

    def __cinit__(self, int width):
        self.width = width
        _root(&self.x)

    def grow(self, const float[:, ::1] rows not None):
        """Return the next depth's nodes as (index of the parent, rank), in the order of paths.

        ``rows`` float32[n, at least 8]: the probabilities of the candidates of the n nodes that
        the last call returned, at first the root, best first, NaN where there are fewer.
        """
        cdef Layer below
        cdef int i
        if rows.shape[0] != self.x.n or rows.shape[1] < RANKS:
            raise ValueError(f"{rows.shape[0]} rows for {self.x.n} nodes")
        if self.x.n:
            _grow(&self.x, self.width, &rows[0, 0], rows.shape[1], &below)
            self.x = below
        return [(self.x.parent[i], self.x.rank[i]) for i in range(self.x.n)]


cdef inline bint _ordered(const float *p) noexcept nogil:
    """Whether these are probabilities, best first, NaN at the end alone."""
    cdef int r
    for r in range(RANKS):
        if not isnan(p[r]) and (not 0 <= p[r] <= 1 or (r and not p[r] <= p[r - 1])):
            return False
    return True


def first_wrong(
    const uint8_t[:, ::1] node not None, const float[:, ::1] p not None, int roots, int depth,
    int width,
):
    """Return the first row that is not as a recording of this width has it, -1 if all are.

    ``node`` uint8[K, 3] and ``p`` float32[K, 8] as in :class:`mtpstats.trace.TracedPrompt`. K: the
    rows end too early.
    """
    cdef Layer[2] layers
    cdef Layer *x
    cdef Py_ssize_t at = 0, n = node.shape[0]
    cdef int _r, d, i
    with nogil:
        for _r in range(roots):
            x = &layers[0]
            _root(x)
            for d in range(depth):
                for i in range(x.n):
                    if (
                        at + i >= n or node[at + i, 0] != d or node[at + i, 1] != x.parent[i]
                        or node[at + i, 2] != x.rank[i] or not _ordered(&p[at + i, 0])
                    ):
                        with gil:
                            return at + i
                if x.n == 0:
                    break
                _grow(x, width, &p[at, 0], RANKS, &layers[(d + 1) % 2])
                at += x.n
                x = &layers[(d + 1) % 2]
    return -1 if at == n else at
