# ---- a policy that decides in Python


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

    @property
    def width(self):
        return self._prompt.width

    def below(self, path):
        cdef int64_t at, layer, n = self._prompt.beam_node.shape[0]
        cdef const uint8_t[:, ::1] node = self._prompt.beam_node
        cdef int depth = 0, parent = 0
        if not self._prompt.width:
            return None
        at = layer = self.x.beam_at[self.r]
        for rank in path:
            depth += 1
            parent = <int>(at - layer)
            while at < n and node[at, 0] == depth - 1:
                at += 1
            layer = at
            while at < n and node[at, 0] == depth and (
                node[at, 1] != parent or node[at, 2] != rank
            ):
                at += 1
            if at == n or node[at, 0] != depth:
                return None
        return self._prompt.beam_p[at]

    cdef _drive(self, begin, draft, verified, shape_of):
        cdef Limits *lim = &self.run.limits
        begin()
        self.r = 0
        if lim.uniform:
            for self.r in range(self.x.roots):
                if _counts(self.x, lim, self.r):
                    self.o.tokens += self._once(draft, verified, shape_of)
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
