# ---- trees that are grown while they are drafted


cdef struct Growth:
    int32_t n_nodes         # nodes that are verified
    int32_t depth           # steps of the head
    int32_t width           # rows of a step, at most
    int32_t ranks           # candidates of a row that count
    bint eager              # expand what is in the tree so far, and stop as gains fall to delta
    double delta


cdef enum:
    WIDEST = 16
    OFFERS = 2048           # DEPTH * WIDEST * RANKS


# A node that the head offered.
cdef struct Offer:
    double value            # cumulative probability
    int32_t above           # row of the node it is below, as in Text.beam_p
    int32_t row             # its own, -1: it was not expanded
    uint8_t rank
    bint chosen


# What was grown at a root.
cdef struct Grown:
    int32_t n
    int32_t n_chosen
    int32_t steps
    bint failed             # an expanded node had no candidate
    bint near_stop          # noise could have drafted another step, or one less
    int32_t[17] width       # rows of each step
    double last_in          # the worst of the chosen
    double first_out        # the best of the others, -1: none
    # by step, the worst that was expanded, and the best that was not for want of width
    double[17] last_wide
    double[17] first_narrow
    Offer[2048] offers
    int16_t[1024] order     # the chosen, best first


cdef inline bint _offer(Grown *g, int n_nodes, double value) noexcept nogil:
    """Puts a node that is offered next among the best so far; False if it is none of them."""
    cdef int at = g.n_chosen
    cdef Offer *o
    if at == n_nodes:
        o = &g.offers[g.order[at - 1]]
        if value <= o.value:
            g.first_out = max(g.first_out, value)
            return False
        g.first_out = max(g.first_out, o.value)
        o.chosen = False
        at -= 1
    else:
        g.n_chosen += 1
    while at > 0 and g.offers[g.order[at - 1]].value < value:
        g.order[at] = g.order[at - 1]
        at -= 1
    g.order[at] = <int16_t>g.n
    return True


cdef int _widen(const Text *x, Grown *g, const Growth *k, int first, int step, int32_t *rows,
                double *values) noexcept nogil:
    """The nodes to expand of those offered from ``first`` on, in the order of rank paths."""
    cdef int16_t[16] best
    cdef int c, j, n = 0, layer, at
    cdef double narrow = -1
    for c in range(first, g.n):
        if k.eager and not g.offers[c].chosen:
            continue
        if n == k.width:
            if g.offers[c].value <= g.offers[best[n - 1]].value:
                narrow = max(narrow, g.offers[c].value)
                continue
            narrow = max(narrow, g.offers[best[n - 1]].value)
            j = n - 1
        else:
            j = n
            n += 1
        while j > 0 and g.offers[best[j - 1]].value < g.offers[c].value:
            best[j] = best[j - 1]
            j -= 1
        best[j] = <int16_t>c
    if n == 0:
        return 0
    g.last_wide[step], g.first_narrow[step] = g.offers[best[n - 1]].value, narrow
    for j in range(1, n):       # back into the order of paths
        c = best[j]
        at = j
        while at > 0 and best[at - 1] > c:
            best[at] = best[at - 1]
            at -= 1
        best[at] = <int16_t>c
    # the trace's next layer is in the same order
    at = rows[0]
    while x.beam_node[3 * at] < step:
        at += 1
    layer = at
    while layer > 0 and x.beam_node[3 * (layer - 1)] == step - 1:
        layer -= 1
    for j in range(n):
        c = best[j]
        while (
            x.beam_node[3 * at + 1] + layer != g.offers[c].above
            or x.beam_node[3 * at + 2] != g.offers[c].rank
        ):
            at += 1
        g.offers[c].row = rows[j] = at
        values[j] = g.offers[c].value
    return n


cdef void _grow(const Text *x, int r, int depth, const Growth *k, Grown *g) noexcept nogil:
    """Grows the tree of root r."""
    cdef int32_t[16] rows
    cdef double[16] values
    cdef int step, i, rank, first, n = 1
    cdef double q, value, gained, before = 0
    cdef bint among
    cdef Offer *o
    g.n = g.n_chosen = g.steps = 0
    g.failed = g.near_stop = False
    g.first_out = -1
    rows[0], values[0] = x.beam_at[r], 1.0
    for step in range(depth):
        g.width[step] = n
        g.steps += 1
        first = g.n
        for i in range(n):
            for rank in range(k.ranks):
                q = x.beam_p[rows[i] * RANKS + rank]
                if isnan(q):
                    g.failed = g.failed or rank == 0
                    break
                value = values[i] * q
                among = _offer(g, k.n_nodes, value)
                if not among and k.eager:
                    break       # nor are those that follow
                o = &g.offers[g.n]
                o.value, o.above, o.row = value, rows[i], -1
                o.rank, o.chosen = <uint8_t>(rank + 1), among
                g.n += 1
        if g.failed or step + 1 == depth:
            break
        if k.eager:
            gained = 0
            for i in range(g.n_chosen):
                gained += g.offers[g.order[i]].value
            if k.delta > 0 and _near(gained - before, k.delta):
                g.near_stop = True
            if gained - before <= k.delta:
                break
            before = gained
        n = _widen(x, g, k, first, step + 1, rows, values)
        if n == 0:
            break
    g.last_in = g.offers[g.order[g.n_chosen - 1]].value if g.n_chosen else 0


cdef inline Offer *_chosen_below(Grown *g, int row, int rank) noexcept nogil:
    """The node of a rank, 0: of any, below a row, if it is in the tree."""
    cdef int i
    cdef Offer *o
    for i in range(g.n_chosen):
        o = &g.offers[g.order[i]]
        if o.above == row and (rank == 0 or o.rank == rank):
            return o
    return NULL


cdef bint _close_cut(const Text *x, int r, Grown *g, int accepted) noexcept nogil:
    """Whether noise could have left an accepted node out, or taken in the one that was missed."""
    cdef int d, rank, row = x.beam_at[r]
    cdef double ratio = 1.0, value = 1.0
    cdef Offer *o
    if g.near_stop:
        return True
    for d in range(accepted + 1):
        ratio *= HEAD_RATIO
        rank = x.rank[r * x.depth + d] if d < x.depth else 0
        if row < 0 or rank == 0 or rank == UNKNOWN:
            return False
        value *= x.beam_p[row * RANKS + rank - 1]
        o = _chosen_below(g, row, rank)
        if o == NULL:
            return g.first_out >= 0 and g.last_in < value * ratio
        if value < g.first_out * ratio:
            return True
        if d + 1 < g.steps:     # it was expanded or, for want of width, not
            if o.row >= 0 and value < g.first_narrow[d + 1] * ratio:
                return True
            if o.row < 0 and g.last_wide[d + 1] < value * ratio:
                return True
        row = o.row
    return False


cdef int _grown(
    const Text *x, const Limits *lim, int r, const Growth *k, Grown *g, Out *o, int *sent,
    int *listed
) noexcept nogil:
    """As ``_tree`` for a tree that is grown at the root."""
    cdef Plan plan = _plan(x, lim, r, k.depth, 0)
    cdef int s, i, row = x.beam_at[r], accepted = 0, reached = 0, rank = 0, grew, deepest = 0
    cdef Offer *node
    cdef bint leaf = True
    _grow(x, r, plan.limit, k, g)
    while not g.failed and row >= 0 and _chosen_below(g, row, 0) != NULL:
        reached = accepted + 1
        rank = x.rank[r * x.depth + accepted]
        node = NULL
        if rank != 0 and rank != UNKNOWN:
            node = _chosen_below(g, row, rank)
        if node == NULL:
            leaf = False
            break
        accepted += 1
        row = node.row
    if not g.failed:
        for i in range(g.n_chosen):
            deepest = max(deepest, x.beam_node[3 * g.offers[g.order[i]].above] + 1)
    grew = _branched(
        x, lim, r, o, 0 if g.failed else g.n_chosen, deepest, accepted, reached, leaf, g.failed,
        plan.reason if accepted == plan.limit else REASON_N_MAX,
        o.near_tie < 0 and o.pairs != NULL and _close_cut(x, r, g, accepted), sent, listed
    )
    if grew:
        for s in range(g.steps):
            o.widths[g.width[s]] += 1
    return grew
