"""What a replayed policy gives, with 95 % intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mtpstats.intervals import Interval, Z, cluster_bootstrap
from mtpstats.replay import Replay, Totals

__all__ = ["Figures", "figures"]

Estimate: TypeAlias = Interval | None


@dataclass(frozen=True)
class Figures:
    """One policy over all prompts. A figure is None where nothing was verified or drafted.

    The intervals come from a bootstrap over prompts; with a single one ``length`` has a normal
    interval over its verifications, which is too narrow for dependent tokens.
    """

    policy: str
    starts: str
    tokens: int
    verifications: int
    drafted: int
    """Nodes sent to the target."""
    accepted: int
    steps: int
    """Steps of the head."""
    step_rows: int
    """Rows the head ran in them."""
    length: Estimate
    """Tokens per verification."""
    acceptance: Estimate
    """accepted / drafted."""
    nodes: Estimate
    """Nodes per verification."""
    coverage: Estimate
    """Nodes per generated token."""
    head_steps: Estimate
    """Steps of the head per verification."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types; an interval is [value, low, high]."""
        found = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            found[name] = list(value) if isinstance(value, Interval) else value
        return found


def figures(found: Replay, *, seed: int = 0) -> Figures:
    """Return the figures of a replay."""
    totals = found.totals
    steps = totals.widths.sum(axis=1)
    tops = (totals.tokens, totals.accepted, totals.drafted, totals.drafted, steps)
    bottoms = (
        totals.verifications,
        totals.drafted,
        totals.verifications,
        totals.tokens,
        totals.verifications,
    )
    rates = (
        cluster_bootstrap(np.stack(tops, axis=1), np.stack(bottoms, axis=1), seed=seed)
        if len(totals.tokens)
        else [None] * 5
    )
    whole = [
        _whole(rate, int(top.sum()), int(bottom.sum()))
        for rate, top, bottom in zip(rates, tops, bottoms, strict=True)
    ]
    return Figures(
        policy=str(found.policy),
        starts=found.starts,
        tokens=found.tokens,
        verifications=found.n_verifications,
        drafted=found.drafted,
        accepted=found.accepted,
        steps=int(steps.sum()),
        step_rows=int(totals.widths.sum(axis=0) @ np.arange(totals.widths.shape[1])),
        length=rates[0] if rates[0] is not None else _length(totals),
        acceptance=whole[1],
        nodes=whole[2],
        coverage=whole[3],
        head_steps=whole[4],
    )


def _whole(rate: Estimate, top: int, bottom: int) -> Estimate:
    """Return the interval; where prompts do not tell how the figure varies, none around it."""
    if rate is not None or bottom == 0:
        return rate
    value = top / bottom
    return Interval(value, value, value)


def _length(totals: Totals) -> Estimate:
    passes = int(totals.verifications.sum())
    if passes == 0:
        return None
    value = int(totals.tokens.sum()) / passes
    counts = totals.lengths.sum(axis=0)
    lengths = np.arange(len(counts))
    mean = float(counts @ lengths) / passes
    half = Z * math.sqrt(float(counts @ (lengths - mean) ** 2) / passes / passes)
    return Interval(value, max(1.0, value - half) if value >= 1 else value, value + half)
