"""Traces and costs small enough to work everything out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import made
import numpy as np

from mtpstats.cost import Costs, Curve, Point
from mtpstats.trace import TracedPrompt

trace = made.trace


def text(rows: Sequence[Sequence[int]], name: str = "a", sure: float = 1.0) -> TracedPrompt:
    """A text of one prompt token whose root t has the ranks ``rows[t]``; it ends in an
    end-of-generation token. Every probability that p_min is compared with is ``sure``."""
    n, depth = len(rows), len(rows[0])
    known = [list(row[: n - t]) for t, row in enumerate(rows)]
    known = [row[: row.index(0) + 1] if 0 in row else row for row in known]
    return made.prompt(
        known,
        depth,
        stop="eog",
        id=name,
        tokens=ord(name[0]) + np.arange(n + 1),
        p_min_p=np.full((n, depth), sure),
    )


# Root 1 guesses x[2] with its second choice, root 2 x[4] with none, root 4 x[5] with its second.
MIXED = ((1, 1), (2, 1), (1, 0), (1, 1), (2, 1), (1, 1))
MISSES = ((0, 0),) * 4


def costs(
    verify: dict[int, Any], draft: float, follow: float | dict[int, Any] = 0.0, **rest: Any
) -> Costs:
    """Costs from numbers or lists of samples, in seconds."""

    def curve(points: dict[int, Any]) -> Curve:
        return Curve({n: Point.of(s if isinstance(s, list) else [s]) for n, s in points.items()})

    return Costs(
        verify=curve(verify),
        draft=curve({1: draft}),
        follow=curve(follow if isinstance(follow, dict) else {1: follow}),
        **rest,
    )


COSTS = costs(
    {1: 10, 2: 11, 3: 13}, draft=2, follow={1: 1, 3: 2}, other_verification=0.5, other_token=0.25,
    other_plain=0.5,
)  # fmt: skip
TWO = trace(text(MIXED), text(MISSES, "b"))
