"""Traces and costs small enough to work everything out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpstats.cost import Costs, Curve
from mtpstats.trace import UNKNOWN, Trace, TracedPrompt, trace_header


def text(rows: Sequence[Sequence[int]], name: str = "a", sure: float = 1.0) -> TracedPrompt:
    """A text of one prompt token whose root t has the ranks ``rows[t]``; it ends in an
    end-of-generation token. Every probability that p_min is compared with is ``sure``."""
    n, depth = len(rows), len(rows[0])
    rank = np.array(rows, np.uint8)
    past_end = np.arange(n)[:, None] + np.arange(depth) >= n
    rank[past_end] = UNKNOWN
    gone = np.logical_or.accumulate((rank == 0) | (rank == UNKNOWN), axis=1)
    rank[:, 1:][gone[:, :-1]] = UNKNOWN
    left = np.zeros(rank.shape, bool)
    left[:, 1:] = np.logical_or.accumulate(rank != 1, axis=1)[:, :-1]
    off = np.flatnonzero(left & (rank != UNKNOWN))
    p = np.broadcast_to(np.array([0.5, 0.3, 0.1, 0.05, 0.02, 0.01, 0, 0]), (n, depth, 8))
    return TracedPrompt(
        id=name,
        category=None,
        n_prompt=1,
        stop="eog",
        n_ctx=1000,
        seconds=1.0,
        tokens=np.arange(n + 1),
        margin=np.ones(n),
        roots=np.arange(n),
        rank=rank,
        p=p,
        top10=np.ones((n, depth)),
        p_min_p=np.full((n, depth), sure),
        off_index=off,
        off_p=p.reshape(-1, 8)[off],
        off_top10=np.ones(len(off)),
        overlap=np.full((n, depth), np.nan),
    )


def trace(*texts: TracedPrompt, **header: Any) -> Trace:
    return Trace(trace_header(depth=texts[0].depth, **header), texts)


# Root 1 guesses x[2] with its second choice, root 2 x[4] with none, root 4 x[5] with its second.
MIXED = ((1, 1), (2, 1), (1, 0), (1, 1), (2, 1), (1, 1))
MISSES = ((0, 0),) * 4


def costs(
    verify: dict[int, Any], draft: float, follow: float | dict[int, Any] = 0.0, **rest: Any
) -> Costs:
    """Costs from numbers or lists of samples, in seconds."""

    def curve(points: dict[int, Any]) -> Curve:
        return Curve({n: s if isinstance(s, list) else [s] for n, s in points.items()})

    return Costs(
        verify=curve(verify),
        draft=Curve({1: [draft]}),
        follow=curve(follow if isinstance(follow, dict) else {1: follow}),
        **rest,
    )
