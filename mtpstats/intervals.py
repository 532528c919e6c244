"""95 % intervals: Wilson for a proportion, a bootstrap over prompts, Greenwood for survival.

``None`` stands for a number that the data does not have; it is never 0 and never 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mtpstats.errors import InputError

Z: Final = 1.959963984540054  # the normal distribution's 97.5 % point

RESAMPLES: Final = 2000
Floats: TypeAlias = npt.NDArray[np.float64]

_CELLS: Final = 1 << 22  # resampled weights held at once, which bounds the memory of a bootstrap


class Interval(NamedTuple):
    """A figure and its 95 % interval."""

    value: float
    lo: float
    hi: float


def wilson(k: float, n: float) -> Interval | None:
    """Wilson's score interval of a proportion ``k / n``; None when n is 0.

    It stays inside 0..1 and has a width at 0 and at 1 too. ``k`` need not be whole: for the mean
    of n numbers in 0..1 that add up to k it is at least as wide as it should be, since no such
    numbers vary more than zeros and ones of the same mean. Raises InputError unless 0 <= k <= n.

    >>> wilson(1, 2)  # 0.5, from 0.09 to 0.91
    """
    if not 0 <= k <= n or not math.isfinite(n):
        raise InputError(f"{k} of {n} is no proportion")
    if n == 0:
        return None
    p, square = k / n, Z * Z / n
    centre = (p + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(p * (1 - p) / n + square / (4 * n))
    # at the ends the exact bound is p itself, which rounding would miss
    return Interval(p, 0.0 if k == 0 else centre - half, 1.0 if k == n else centre + half)


def cluster_bootstrap(
    numerators: npt.ArrayLike,
    denominators: npt.ArrayLike,
    *,
    of: Sequence[int] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Interval | None]:
    """Percentile intervals of ratios of sums, resampling whole clusters (prompts).

    Args:
        numerators: [clusters, figures], counts or sums.
        denominators: [clusters, denominators], likewise.
        of: [figures] which denominator each figure has; None: each its own, in order. Figure j is
            ``numerators[:, j].sum() / denominators[:, of[j]].sum()``.
        resamples: how many times the clusters are drawn anew, with replacement.
        seed: of the draws; the same seed gives the same intervals.

    Returns:
        One interval a figure; None where fewer than two clusters have a denominator, or where
        all resamples agree: then the clusters say nothing about how the figure varies.

    Raises:
        InputError: shapes that differ, fewer than 1 resample.
    """
    top = np.asarray(numerators, np.float64)
    bottom = np.asarray(denominators, np.float64)
    if top.ndim != 2 or bottom.ndim != 2 or len(top) != len(bottom):
        raise InputError(f"bootstrap: shapes {top.shape} and {bottom.shape} do not fit")
    column = list(range(bottom.shape[1]) if of is None else of)
    if len(column) != top.shape[1]:
        raise InputError(f"bootstrap: {len(column)} denominators for {top.shape[1]} figures")
    ratios = ratios_of_sums(top, bottom, column, resamples=resamples, seed=seed)
    around, varies = bounds(ratios)
    told = varies & (np.count_nonzero(bottom > 0, axis=0) >= 2)[column]
    above, below = top.sum(axis=0).tolist(), bottom.sum(axis=0)[column].tolist()
    return [
        Interval(a / b, *pair) if says else None
        for a, b, pair, says in zip(above, below, around.tolist(), told.tolist(), strict=True)
    ]


def ratios_of_sums(
    top: Floats, bottom: Floats, of: Sequence[int], *, resamples: int = RESAMPLES, seed: int = 0
) -> Floats:
    """Figures of resampled clusters, [resamples, figures]; NaN where a resample has none.

    Arguments as of :func:`cluster_bootstrap`. The same number of clusters and the same seed
    draw the same clusters, so that two calls are paired.
    """
    if resamples < 1:
        raise InputError(f"bootstrap: {resamples} resamples are too few")
    clusters = len(top)
    rng = np.random.default_rng(seed)
    step = max(1, _CELLS // max(1, clusters))
    ratios = []
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn = rng.integers(0, max(1, clusters), (rows, clusters))
        drawn += clusters * np.arange(rows)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=rows * clusters)
        shaped = weights.reshape(rows, clusters).astype(np.float64)
        below = (shaped @ bottom)[:, of]
        # a resample without the figure's denominator does not have the figure
        ratios.append(
            np.divide(shaped @ top, below, out=np.full_like(below, np.nan), where=below > 0)
        )
    return np.concatenate(ratios)


def bounds(values: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """95 % bounds of resampled figures, [figures, 2], and which figures vary at all, [figures].

    ``values`` is [resamples, figures]. Resamples without the figure (NaN) are left out; where none
    has it the bounds are NaN and it does not vary.
    """
    columns = np.ascontiguousarray(values.T)
    found = np.full((len(columns), 2), np.nan)
    whole = ~np.isnan(columns).any(axis=1)
    found[whole] = _tails(columns[whole])
    for j in np.flatnonzero(~whole):
        known = columns[j][~np.isnan(columns[j])]
        if known.size:
            found[j] = _tails(known[None])
    low, high = np.fmin.reduce(columns, axis=1), np.fmax.reduce(columns, axis=1)
    return found, high - low > 1e-12 * np.maximum(np.abs(low), np.abs(high))


def _tails(rows: Floats) -> Floats:
    """The 2.5 % and 97.5 % points of each row, [rows, 2], interpolated between neighbours.

    ``np.quantile`` gives the same, but its first call imports half of numpy.
    """
    at = [tail * (rows.shape[1] - 1) for tail in (0.025, 0.975)]
    below = [math.floor(x) for x in at]
    above = [math.ceil(x) for x in at]
    ordered = np.partition(rows, [*below, *above], axis=1)
    low, high = ordered[:, below], ordered[:, above]
    points: Floats = low + (np.array(at) - below) * (high - low)
    return points


def greenwood(accepted: Sequence[int], reached: Sequence[int]) -> list[Interval | None]:
    """Survival ``prod_{j <= i} accepted_j / reached_j`` with Greenwood's variance.

    Drafts that end early leave the risk set (``reached``) and do not depress later positions. The
    interval is symmetric in log(-log(survival)), so that it stays inside 0..1. Where that has no
    variance: at survival 1 it is Wilson's for the fewest reached so far; at 0 it reaches from 0 to
    the upper bound before times Wilson's for this position. None from the first position that was
    never reached.
    """
    result: list[Interval | None] = []
    survival, variance, fewest, upper = 1.0, 0.0, math.inf, 1.0
    for k, n in zip(accepted, reached, strict=True):
        step = wilson(k, n)
        if step is None:
            break
        fewest = min(fewest, n)
        survival *= k / n
        if survival == 0.0:
            interval = Interval(0.0, 0.0, upper * step.hi)
        else:
            variance += (n - k) / (n * k)
            if variance == 0.0:
                interval = wilson(fewest, fewest) or step
            else:
                log = math.log(survival)
                spread = math.exp(Z * math.sqrt(variance) / -log)
                interval = Interval(survival, math.exp(log * spread), math.exp(log / spread))
        upper = interval.hi
        result.append(interval)
    return result + [None] * (len(accepted) - len(result))
