"""What a trace says about the head itself: uniform starts, every root once.

A run starts at roots of its policy's own choosing, so its figures differ from these though the
head is the same; the two are never mixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mtpstats.intervals import Interval, cluster_bootstrap, wilson
from mtpstats.policy import RANKS, Tree
from mtpstats.replay import reach, replay
from mtpstats.summary import Summary, summarise
from mtpstats.trace import UNKNOWN, Trace

__all__ = ["Continuation", "continuations", "head_summary", "overlaps"]


def head_summary(trace: Trace, *, seed: int = 0) -> Summary:
    """Return the live statistics of the longest chain, with every root as a start.

    ``positions[i].recall[k - 1]`` is recall@k of draft position i, ``ranks`` the rates of each
    rank, given that all before was right at rank 1.
    """
    found = replay(trace, Tree.chain(reach(trace)), starts="uniform")
    return summarise(found.snapshot, [prompt.snapshot for prompt in found.prompts], seed=seed)


@dataclass(frozen=True)
class Continuation:
    """How a branch goes on: of the roots whose choice at ``position`` was the head's ``rank``-th,
    all before at rank 1, how often its first choice was right at the next position."""

    position: int
    """Draft position from 0."""
    rank: int
    cases: int
    """Roots where the next position is known."""
    hits: int
    rate: Interval | None


def continuations(trace: Trace, *, seed: int = 0) -> list[Continuation]:
    """Return continuations of every position but the last and every rank from 1.

    Rank 2 is what a branch earns beyond its one leaf, rank 1 what a chain does. The intervals come
    from a bootstrap over prompts, or are Wilson's where that says nothing.
    """
    places = [(d, k) for d in range(trace.depth - 1) for k in range(1, RANKS + 1)]
    if not trace.prompts or not places:
        return []
    cases = np.zeros((len(trace.prompts), len(places)), np.int64)
    hits = np.zeros_like(cases)
    for i, prompt in enumerate(trace.prompts):
        rank = prompt.rank
        greedy = np.ones(len(rank), np.bool_)
        for d in range(trace.depth - 1):
            known = greedy & (rank[:, d + 1] != UNKNOWN)
            right = known & (rank[:, d + 1] == 1)
            at = slice(d * RANKS, (d + 1) * RANKS)
            cases[i, at] = np.bincount(rank[known, d], minlength=RANKS + 1)[1 : RANKS + 1]
            hits[i, at] = np.bincount(rank[right, d], minlength=RANKS + 1)[1 : RANKS + 1]
            greedy = greedy & (rank[:, d] == 1)
    return [
        Continuation(d, k, int(cases[:, j].sum()), int(hits[:, j].sum()), rate)
        for j, ((d, k), rate) in enumerate(zip(places, _rates(hits, cases, seed), strict=True))
    ]


def overlaps(trace: Trace, *, seed: int = 0) -> list[Interval | None]:
    """Return the mean overlap of target and head at each depth of the forced path.

    It is how often a drafter that uses rejection sampling is accepted there, given that all before
    was among the head's candidates. None where nothing is known.
    """
    sums = np.zeros((len(trace.prompts), trace.depth))
    known = np.zeros((len(trace.prompts), trace.depth), np.int64)
    for i, prompt in enumerate(trace.prompts):
        sums[i] = np.nansum(prompt.overlap.astype(np.float64), axis=0)
        known[i] = (~np.isnan(prompt.overlap)).sum(axis=0)
    if not trace.prompts:
        return [None] * trace.depth
    return _rates(np.minimum(sums, known), known, seed)


def _rates(
    top: npt.NDArray[Any], bottom: npt.NDArray[np.int64], seed: int
) -> list[Interval | None]:
    rates = []
    for j, found in enumerate(cluster_bootstrap(top, bottom, seed=seed)):
        k, n = float(top[:, j].sum()), int(bottom[:, j].sum())
        rates.append(found if found is not None else wilson(k, n))
    return rates
