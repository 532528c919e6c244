"""The policies that a plan looks at: which ones, and what each did on the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from mtpstats.llama import arch
from mtpstats.policy import AdaptiveDepth, Chain, Eagle2, GatedSiblings, Grown, OptTree, Tree
from mtpstats.price import Priced, Pricer, fastest
from mtpstats.replay import AnyPolicy, Totals, heads, reach, totals
from mtpstats.trace import Trace
from mtpstats.trees import best_trees, improve

__all__ = [
    "BUDGET",
    "DEFAULTS",
    "Bench",
    "adaptive",
    "can_branch",
    "chains",
    "default_chain",
    "gates",
    "memory_of",
]

DEFAULTS: Final = Chain(3)
"""What llama.cpp does with ``--spec-type draft-mtp`` and nothing else."""
P_MINS: Final = tuple(round(0.1 * i, 1) for i in range(10))
BUDGET: Final = 64


def memory_of(trace: Trace) -> str:
    """Return how the branches of a tree share the memory of the trace's model.

    ``coupled`` where none could, too: that is what another engine would be like.
    """
    return _branches(trace) or "coupled"


def can_branch(trace: Trace) -> bool:
    """Return whether the driver can verify trees on the trace's model."""
    return _branches(trace) != ""


def _branches(trace: Trace) -> str:
    name = (trace.header.get("model") or {}).get("architecture") or ""
    known = arch.of(str(name), 1)
    return known.branches(known.rollback)


def chains(trace: Trace) -> Iterable[Chain]:
    """Return every chain the trace can answer for, p_min from 0 to 0.9."""
    return (Chain(n, p) for n in range(1, reach(trace) + 1) for p in P_MINS)


def default_chain(trace: Trace) -> Chain:
    """Return what llama.cpp's defaults come to for this model."""
    return replace(DEFAULTS, n_max=min(DEFAULTS.n_max, heads(trace)))


def gates(chains: Sequence[Priced]) -> Iterable[GatedSiblings]:
    """Second choices beside the best chains, at several thresholds."""
    for priced in chains:
        chain = priced.policy
        assert isinstance(chain, Chain)
        for p1_max in (0.3, 0.5, 0.7, 0.9):
            for p2_min in (0.05, 0.1, 0.2, 0.3):
                if p1_max + p2_min <= 1:
                    yield GatedSiblings(chain.n_max, chain.p_min, p1_max=p1_max, p2_min=p2_min)


def adaptive(best: Priced, trace: Trace) -> Iterable[AdaptiveDepth]:
    """Depths that follow the outcomes, with the p_min of the best chain and with none."""
    assert isinstance(best.policy, Chain)
    deepest = reach(trace)
    for n_max in sorted({n for n in (2, 3, 4, 6, 8, 12) if n < deepest} | {deepest}):
        for p_min in sorted({0.0, best.policy.p_min}):
            for up in (1, 2):
                yield AdaptiveDepth(n_max, p_min=p_min, up=up)


def grown(trace: Trace) -> Iterable[Grown]:
    """Trees grown while they are drafted, as wide as the trace's beams; none without beams."""
    deepest = reach(trace)
    for width in sorted({n for n in (1, 2, 4, 8, 16) if n < trace.width} | {trace.width} - {0}):
        for n_nodes in (4, 8, 16):
            yield OptTree(n_nodes, deepest, width, 0.1)
            if width > 1:
                yield Eagle2(n_nodes, min(4, deepest), width)


def around(best: Grown, deepest: int) -> Iterable[Grown]:
    """Others like a grown tree: smaller and larger, more and less eager to go deeper."""
    for n_nodes in (best.n_nodes // 2, best.n_nodes * 3 // 2, best.n_nodes * 2):
        yield replace(best, n_nodes=n_nodes)
    if isinstance(best, OptTree):
        for delta in (0.0, 0.05, 0.2, 0.4):
            yield replace(best, delta=delta)
    else:
        for depth in (2, 3, 6, 8):
            if depth <= deepest and depth != best.depth:
                yield replace(best, depth=depth)


class Bench:
    """Policies over one trace, replayed and priced."""

    def __init__(self, trace: Trace, pricer: Pricer, seed: int) -> None:
        self.starts = "policy" if trace.every == 1 else "uniform"
        self._trace, self._pricer = trace, pricer
        n = len(trace.prompts)
        order = np.random.default_rng(seed).permutation(n)
        self._halves = [np.sort(order[: n // 2]), np.sort(order[n // 2 :])] if n > 1 else []
        self._parts = [trace.select(half.tolist()) for half in self._halves]

    def _totals(self, policy: AnyPolicy, trace: Trace | None = None) -> Totals:
        return totals(trace or self._trace, policy, starts=self.starts)

    def priced(self, policies: Iterable[AnyPolicy]) -> list[Priced]:
        """Replay and price."""
        return self._pricer.price((policy, self._totals(policy)) for policy in policies)

    def grown(self) -> list[Priced]:
        """Trees grown while they are drafted: a few of each kind, and more around the fastest."""
        found = self.priced(grown(self._trace))
        for kind in (OptTree, Eagle2):
            best = fastest(p for p in found if isinstance(p.policy, kind))
            if best is not None:
                assert isinstance(best.policy, Grown)
                found += self.priced(around(best.policy, reach(self._trace)))
        return found

    def trees(self, budget: int) -> list[Priced]:
        """The best tree of each budget; the fastest one improved for the starts of a run."""
        found = self._unseen(lambda trace: best_trees(trace, budget))
        best = fastest(found)
        if best is None or self.starts != "policy":
            return found
        n = len(best.policy.paths)  # type: ignore[union-attr]
        better = self._unseen(lambda trace: [improve(trace, n)])[0]
        return [better if p is best and better.speeds[0] > best.speeds[0] else p for p in found]

    def _unseen(self, choose: Callable[[Trace], Sequence[Tree]]) -> list[Priced]:
        """Trees chosen on all prompts, priced as those that one half chooses are for the other."""
        trees = _growing(choose(self._trace))
        seen = self.priced(trees)
        if not self._parts:
            return seen
        chosen = [choose(part) for part in self._parts]
        pairs = [
            [
                self._totals(others[i], part)
                for part, others in zip(self._parts, reversed(chosen), strict=True)
            ]
            for i in range(len(trees))
        ]
        unseen = self._pricer.price(
            (tree, self._joined(pair)) for tree, pair in zip(trees, pairs, strict=True)
        )
        return [replace(u, in_sample=s.rate) for u, s in zip(unseen, seen, strict=True)]

    def _joined(self, pair: Sequence[Totals]) -> Totals:
        """Return the totals of both halves in the order of the prompts."""
        back = np.argsort(np.concatenate(self._halves))

        def joined(name: str) -> npt.NDArray[np.int64]:
            arrays = [getattr(part, name) for part in pair]
            if arrays[0].ndim == 2:
                width = max(a.shape[1] for a in arrays)
                arrays = [np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in arrays]
            both: npt.NDArray[np.int64] = np.concatenate(arrays)[back]
            return both

        return Totals(**{name: joined(name) for name in Totals.__dataclass_fields__})


def _growing(trees: Sequence[Tree]) -> list[Tree]:
    """Leave out what comes after the largest tree, and trees of no node."""
    sizes = [0, *map(len, trees)]
    return [tree for tree, before in zip(trees, sizes, strict=False) if len(tree) > before]
