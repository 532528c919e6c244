"""Which tree to draft for a budget of nodes, and how sure one can be of it.

Over uniform starts the answer is exact: count every prefix of the recorded rank paths; a child is
never more frequent than its parent, so the n most frequent prefixes are a tree, and no other of n
nodes accepts more. A run starts at other roots than all, so :func:`improve` goes on from there by
replaying. Ties go to the shallower node, then to the lower rank.

``length`` is always the mean acceptance length: tokens per verification, the target's own token
included.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mtpstats._replay import Paths
from mtpstats.errors import InputError
from mtpstats.intervals import Interval
from mtpstats.policy import MAX_NODES, RANKS, Path, Tree
from mtpstats.replay import limits, reach, replay, store, totals
from mtpstats.trace import Trace

__all__ = [
    "TreeChoice",
    "best_trees",
    "choose",
    "estimated_length",
    "improve",
    "position_rates",
    "tree_from_rates",
    "unseen_lengths",
]

Weights: TypeAlias = npt.NDArray[np.int64]
Counts: TypeAlias = npt.NDArray[np.int64]
Rates: TypeAlias = npt.NDArray[np.float64]
Nodes: TypeAlias = frozenset[int]
Score: TypeAlias = tuple[int, int]  # tokens, verifications

TRIES: Final = 8  # swaps replayed before a search gives up
PASSES: Final = 32
COMMON: Final = 1024  # paths looked at


class _Search:
    """The rank paths of a trace, and replays of trees over some of its prompts.

    A tree is a set of nodes of the trie of paths, without its root 0.
    """

    def __init__(
        self, trace: Trace, n_nodes: int, n_predict: int | None = None, starts: str = "policy"
    ) -> None:
        self.paths = Paths(store(trace), *limits(trace, n_predict, None, starts))
        most = max(COMMON, 8 * n_nodes)
        if self.paths.n > most + 1:
            # what is far too rare for a tree of so many nodes only takes time
            counts = self.paths.counts(_ones(trace))
            least = max(1, np.partition(counts[1:], -most)[-most])
            self.paths.keep((counts >= least).astype(np.uint8))
        self.parent = self.paths.parent
        self._known: dict[int, Path] = {0: ()}
        self._below: dict[int, list[int]] | None = None

    def path(self, node: int) -> Path:
        """The rank path of a node."""
        if node not in self._known:
            self._known[node] = (*self.path(int(self.parent[node])), int(self.paths.rank[node]))
        return self._known[node]

    def tree(self, nodes: Iterable[int]) -> Tree:
        return Tree(self.path(node) for node in nodes)

    def shares(self, nodes: Nodes, counts: Counts) -> tuple[float, ...]:
        """How many of the starts have each node, in the order of the tree's paths."""
        ordered = sorted(nodes, key=lambda node: (len(self.path(node)), self.path(node)))
        return tuple(float(counts[node]) / max(1, int(counts[0])) for node in ordered)

    def order(self, counts: Counts, most: int) -> list[int]:
        """The most frequent nodes, at most so many, most frequent first."""
        seen = counts[1:]
        most = min(most, int(np.count_nonzero(seen)))
        if most == 0:
            return []
        least = np.partition(seen, len(seen) - most)[len(seen) - most]
        found = np.flatnonzero(seen >= least) + 1
        ranked = sorted(found.tolist(), key=lambda node: self._key(node, counts))
        return ranked[:most]

    def _key(self, node: int, counts: Counts) -> tuple[int, int, Path]:
        path = self.path(node)
        return -int(counts[node]), len(path), path

    def walk(self, nodes: Nodes, weights: Weights) -> tuple[Score, Counts]:
        """Replay: the score of the weighted prompts, and the prefix counts of the starts."""
        chosen = np.zeros(self.paths.n, np.uint8)
        chosen[list(nodes)] = 1
        passes, tokens, counts = self.paths.walk(chosen, weights)
        return (int(tokens @ weights), int(passes @ weights)), counts

    def improve(self, nodes: Nodes, n: int, weights: Weights) -> tuple[Nodes, Score]:
        """Search on from a tree: first by the starts it has itself, then leaf by leaf."""
        score, counts = self.walk(nodes, weights)
        for _ in range(PASSES):
            other = frozenset(self.order(counts, n))
            if other == nodes:
                break
            found, starts = self.walk(other, weights)
            if not _better(found, score):
                break
            nodes, score, counts = other, found, starts
        for _ in range(PASSES):
            for other in self._swaps(nodes, n, counts):
                found, starts = self.walk(other, weights)
                if _better(found, score):
                    nodes, score, counts = other, found, starts
                    break
            else:
                break
        return nodes, score

    def _swaps(self, nodes: Nodes, n: int, counts: Counts) -> list[Nodes]:
        """Trees with one leaf elsewhere, those first that the present starts speak for."""
        inner = {int(self.parent[node]) for node in nodes}
        leaves = sorted(nodes - inner, key=lambda node: self._key(node, counts), reverse=True)
        ends = [
            node
            for node in self.order(counts, n + 4 * TRIES)
            if node not in nodes and (self.parent[node] == 0 or int(self.parent[node]) in nodes)
        ][:TRIES]
        if len(nodes) < n:
            return [nodes | {end} for end in ends]
        pairs = [
            (int(counts[leaf] - counts[end]), self._key(end, counts), leaf, end)
            for leaf in leaves[:TRIES]
            for end in ends
            if self.parent[end] != leaf
        ]
        return [nodes - {leaf} | {end} for _, _, leaf, end in sorted(pairs)[:TRIES]]


def _better(a: Score, b: Score) -> bool:
    """Whether a has more tokens per verification."""
    return a[0] * b[1] > b[0] * a[1]


def _length(score: Score) -> float | None:
    return score[0] / score[1] if score[1] else None


def _ones(trace: Trace) -> Weights:
    return np.ones(len(trace.prompts), np.int64)


def _check_budget(n: int) -> None:
    if not 0 <= n <= MAX_NODES:
        raise InputError(f"a tree cannot have {n} nodes: 0 to {MAX_NODES}")


def best_trees(trace: Trace, n_nodes: int = 64) -> list[Tree]:
    """Return the best tree over uniform starts of 1, 2, ... ``n_nodes`` nodes.

    Each contains the one before. A tree stays smaller than its budget where no other path ever
    occurred. Raises InputError as ``replay`` does.
    """
    _check_budget(n_nodes)
    search = _Search(trace, n_nodes, starts="uniform")
    ranked = search.order(search.paths.counts(_ones(trace)), n_nodes)
    return [search.tree(ranked[:n]) for n in range(1, n_nodes + 1)]


def improve(trace: Trace, n_nodes: int, *, n_predict: int | None = None) -> Tree:
    """Return a tree for a run's own starts: the best over uniform ones, and what a search that
    replays makes better of it. It accepts at least as many tokens a verification."""
    _check_budget(n_nodes)
    search = _Search(trace, n_nodes, n_predict)
    ranked = search.order(search.paths.counts(_ones(trace)), n_nodes)
    return search.tree(search.improve(frozenset(ranked), n_nodes, _ones(trace))[0])


def position_rates(trace: Trace) -> Rates:
    """Return [D, 8]: how often each rank was right at a draft position that was reached.

    Uniform starts, all before it accepted at rank 1: what live statistics of a chain show. 0 where
    nothing was reached.
    """
    counted = replay(trace, Tree.chain(reach(trace)), starts="uniform").snapshot
    reached = np.maximum(counted.reached[: trace.depth, None], 1)
    rates: Rates = counted.rank[: trace.depth] / reached
    return rates


def estimated_length(tree: Tree, rates: npt.ArrayLike) -> float:
    """Return a tree's length if ranks at different positions were independent of each other.

    ``rates`` [D, 8] as :func:`position_rates`. One (1) of rate 0.6 with a (1, 1) of 0.5 below it:
    1 + 0.6 + 0.3.
    """
    table = np.asarray(rates, np.float64)
    total = 1.0
    for path in tree.paths:
        total += float(np.prod([table[d, rank - 1] for d, rank in enumerate(path)]))
    return total


def tree_from_rates(rates: npt.ArrayLike, n_nodes: int) -> Tree:
    """Return the tree of n nodes with the largest :func:`estimated_length`.

    It is what one would build from per-position rates alone.
    """
    _check_budget(n_nodes)
    table = np.asarray(rates, np.float64)
    waiting: list[tuple[float, int, Path]] = []

    def add(above: Path, share: float) -> None:
        if len(above) < len(table):
            for rank in range(1, RANKS + 1):
                below = share * float(table[len(above), rank - 1])
                if below > 0:
                    heapq.heappush(waiting, (-below, len(above) + 1, (*above, rank)))

    add((), 1.0)
    paths: list[Path] = []
    while waiting and len(paths) < n_nodes:
        share, _, path = heapq.heappop(waiting)
        paths.append(path)
        add(path, -share)
    return Tree(paths)


@dataclass(frozen=True)
class TreeChoice:
    """The trees for a budget of nodes. Lengths without another word are replayed, over the whole
    trace; None where there is nothing to replay."""

    budget: int
    tree: Tree
    """The one to take: best over uniform starts, or improved for a run's own."""
    length: float | None
    shares: tuple[float, ...]
    """Of each of its nodes: how many of all roots have its path as a prefix of theirs."""
    improved: bool
    """Whether the search found a better one than the best over uniform starts."""
    uniform: Tree
    """The best over uniform starts."""
    uniform_length: float | None
    """Its length over uniform starts, which no tree of this size exceeds."""
    uniform_replayed: float | None
    """Its length in a run."""
    estimate: float
    """Length over uniform starts that ``uniform`` would have if positions were independent."""
    from_rates: Tree
    """The tree that per-position rates suggest."""
    from_rates_length: float | None
    from_rates_estimate: float
    half: Tree | None
    """The one to take by every other prompt alone; None if there is only one prompt."""
    half_length: float | None
    """Its length on the prompts it was chosen on ..."""
    other_half_length: float | None
    """... and on those it was not."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types, trees as Medusa-style choices."""
        found = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            found[name] = value.choices() if isinstance(value, Tree) else value
        return found


def choose(
    trace: Trace, budgets: Sequence[int] = range(1, 65), *, n_predict: int | None = None
) -> list[TreeChoice]:
    """Return the trees of each budget, ascending, with what they give on all and on unseen prompts.

    Raises InputError for a trace that does not hold every root, or a budget outside 0..1023.
    """
    budgets = sorted(set(budgets))
    for n in budgets:
        _check_budget(n)
    most = budgets[-1] if budgets else 0
    search = _Search(trace, most, n_predict)
    everything = _ones(trace)
    first = np.arange(len(trace.prompts)) % 2 == 0
    halves = first.astype(np.int64), (~first).astype(np.int64)
    rates = position_rates(trace)
    counts = search.paths.counts(everything)
    ranked = search.order(counts, most)
    half_ranked = search.order(search.paths.counts(halves[0]), most)
    n_roots = int(counts[0])
    chosen: list[TreeChoice] = []
    before: Nodes = frozenset()
    half_before: Nodes = frozenset()
    for n in budgets:
        uniform = frozenset(ranked[:n])
        plain, _ = search.walk(uniform, everything)
        before, score = _grown(search, uniform, before, n, everything)
        half = half_score = unseen = None
        if len(trace.prompts) > 1:
            half_uniform = frozenset(half_ranked[:n])
            half_before, half_score = _grown(search, half_uniform, half_before, n, halves[0])
            half = search.tree(half_before)
            unseen, _ = search.walk(half_before, halves[1])
        from_rates = tree_from_rates(rates, n)
        found = _replayed(trace, from_rates, n_predict)
        uniform_tree = search.tree(uniform)
        chosen.append(
            TreeChoice(
                budget=n,
                tree=search.tree(before),
                length=_length(score),
                shares=search.shares(before, counts),
                improved=before != uniform,
                uniform=uniform_tree,
                uniform_length=_length((n_roots + sum(int(counts[i]) for i in uniform), n_roots)),
                uniform_replayed=_length(plain),
                estimate=estimated_length(uniform_tree, rates),
                from_rates=from_rates,
                from_rates_length=_length(found),
                from_rates_estimate=estimated_length(from_rates, rates),
                half=half,
                half_length=_length(half_score) if half_score else None,
                other_half_length=_length(unseen) if unseen else None,
            )
        )
    return chosen


def _replayed(trace: Trace, tree: Tree, n_predict: int | None) -> Score:
    """Return (tokens, verifications) of a tree over the whole trace."""
    found = totals(trace, tree, n_predict=n_predict)
    return int(found.tokens.sum()), int(found.verifications.sum())


def _grown(
    search: _Search, uniform: Nodes, before: Nodes, n: int, weights: Weights
) -> tuple[Nodes, Score]:
    """The better of two searches: from the uniform tree, and from the last budget's tree."""
    nodes, score = search.improve(uniform, n, weights)
    if before and before != uniform:
        others, other_score = search.improve(before, n, weights)
        if _better(other_score, score):
            return others, other_score
    return nodes, score


def unseen_lengths(
    trace: Trace,
    budgets: Sequence[int],
    *,
    resamples: int = 100,
    seed: int = 0,
    n_predict: int | None = None,
) -> list[Interval | None]:
    """Return the length, in a run, on prompts that the tree was not chosen on.

    Each resample draws as many prompts as there are, with replacement, finds the best tree over
    uniform starts of these anew and replays it on the prompts that were not drawn. An interval
    holds the middle 95 % of the resamples. None with fewer than two prompts.
    """
    if resamples < 1:
        raise InputError(f"{resamples} resamples are too few")
    n = len(trace.prompts)
    if n < 2 or not budgets:
        return [None] * len(budgets)
    search = _Search(trace, max(budgets), n_predict)
    rng = np.random.default_rng(seed)
    lengths: list[list[float]] = [[] for _ in budgets]
    for _ in range(resamples):
        drawn = np.bincount(rng.integers(0, n, n), minlength=n)
        left_out = (drawn == 0).astype(np.int64)
        if not left_out.any():
            continue
        ranked = search.order(search.paths.counts(drawn), max(budgets))
        for found, budget in zip(lengths, budgets, strict=True):
            length = _length(search.walk(frozenset(ranked[:budget]), left_out)[0])
            if length is not None:
                found.append(length)
    intervals: list[Interval | None] = []
    for found in lengths:
        if found:
            lo, hi = np.quantile(found, (0.025, 0.975))
            intervals.append(Interval(float(np.mean(found)), float(lo), float(hi)))
        else:
            intervals.append(None)
    return intervals
