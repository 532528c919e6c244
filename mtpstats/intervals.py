"""95 % intervals: Wilson for a proportion, a bootstrap over prompts, Greenwood for survival.

``None`` stands for a number that the data does not have; it is never 0 and never 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mtpstats.errors import InputError

Z: Final = 1.959963984540054  # the normal distribution's 97.5 % point

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
    resamples: int = 2000,
    seed: int = 0,
) -> list[Interval | None]:
    """Percentile intervals of ratios of sums, resampling whole clusters (prompts).

    Args:
        numerators, denominators: [clusters, figures], counts or sums; figure j is
            ``numerators[:, j].sum() / denominators[:, j].sum()``.
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
    if top.ndim != 2 or top.shape != bottom.shape:
        raise InputError(f"bootstrap: shapes {top.shape} and {bottom.shape} do not fit")
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
        below = shaped @ bottom
        # a resample without the figure's denominator does not have the figure
        ratios.append(
            np.divide(shaped @ top, below, out=np.full_like(below, np.nan), where=below > 0)
        )
    all_ratios = np.concatenate(ratios)
    result: list[Interval | None] = []
    for j in range(top.shape[1]):
        values = all_ratios[:, j][~np.isnan(all_ratios[:, j])]
        if np.count_nonzero(bottom[:, j] > 0) < 2 or np.ptp(values) <= 1e-12 * np.abs(values).max():
            result.append(None)
            continue
        lo, hi = np.quantile(values, (0.025, 0.975))
        result.append(Interval(float(top[:, j].sum() / bottom[:, j].sum()), float(lo), float(hi)))
    return result


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
