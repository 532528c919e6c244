"""Intervals against published values, exact enumeration and plain simulation."""

from __future__ import annotations

import math
import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpstats.errors import InputError
from mtpstats.intervals import Interval, bounds, cluster_bootstrap, greenwood, wilson


def approx(lo: float, hi: float, tolerance: float = 5e-4) -> object:
    return pytest.approx((lo, hi), abs=tolerance)


def test_wilson_published_values() -> None:
    # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3
    for k, n, lo, hi in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = wilson(k, n)
        assert found is not None
        assert found[1:] == approx(lo, hi, 6e-5)
        assert found.value == k / n


@given(st.integers(1, 10**12), st.floats(0, 1))
def test_wilson_stays_inside_and_is_symmetric(n: int, share: float) -> None:
    k = round(n * share)
    a, b = wilson(k, n), wilson(n - k, n)
    assert a is not None
    assert b is not None
    assert 0 <= a.lo <= a.value <= a.hi <= 1
    assert a.lo < a.hi
    assert a.lo == pytest.approx(1 - b.hi, abs=1e-9)


def test_wilson_without_data_and_with_nonsense() -> None:
    assert wilson(0, 0) is None
    for k, n in ((2, 1), (-1, 3), (0, -1), (math.nan, 3), (1, math.inf)):
        with pytest.raises(InputError):
            wilson(k, n)


def test_bootstrap_against_all_resamples() -> None:
    # with 4 clusters every resample can be listed: 4**4 of them, equally likely
    k, n = [1, 5, 2, 9], [10, 10, 4, 12]
    ratios = sorted(
        sum(k[i] for i in pick) / sum(n[i] for i in pick) for pick in product(range(4), repeat=4)
    )
    lo, hi = np.quantile(ratios, (0.025, 0.975))
    found = cluster_bootstrap(np.array(k)[:, None], np.array(n)[:, None], resamples=40_000)[0]
    assert found is not None
    assert found.value == 17 / 36
    assert found[1:] == approx(lo, hi, 0.01)


def test_bootstrap_is_wider_than_wilson_for_dependent_tokens() -> None:
    rng = np.random.default_rng(1)
    n = np.full(200, 50)
    k = rng.binomial(n, rng.beta(2, 2, 200))
    found = cluster_bootstrap(k[:, None], n[:, None])[0]
    naive = wilson(int(k.sum()), int(n.sum()))
    assert found is not None
    assert naive is not None
    # the standard error of a mean of 200 beta(2, 2) shares, plus the binomial part
    spread = 2 * 1.96 * math.sqrt((0.05 + (0.25 - 0.05) / 50) / 200)
    assert found.hi - found.lo == pytest.approx(spread, rel=0.2)
    assert found.hi - found.lo > 2 * (naive.hi - naive.lo)


def test_figures_may_share_a_denominator() -> None:
    n = np.random.default_rng(2).integers(5, 90, (30, 2)).astype(float)
    k = np.stack([n[:, 0] // 2, n[:, 0] // np.arange(1, 31), n[:, 1] // 3], axis=1)
    assert cluster_bootstrap(k, n, of=[0, 0, 1]) == cluster_bootstrap(k, n[:, [0, 0, 1]])
    with pytest.raises(InputError, match="2 denominators for 3 figures"):
        cluster_bootstrap(k, n)


@pytest.mark.parametrize("resamples", [1, 2, 39, 40, 41, 2000])
def test_bounds_are_numpys_quantiles(resamples: int) -> None:
    values = np.random.default_rng(resamples).standard_normal((resamples, 3))
    values[:, 1] = 5.0
    values[::2, 2] = np.nan
    found, varies = bounds(values)
    assert varies.tolist() == [resamples > 1, False, resamples > 3]
    assert found[:2] == pytest.approx(np.quantile(values[:, :2], (0.025, 0.975), axis=0).T)
    if resamples > 1:
        assert found[2] == pytest.approx(np.nanquantile(values[:, 2], (0.025, 0.975)))
    else:
        assert np.isnan(found[2]).all()


def test_bootstrap_is_seeded_and_independent_of_the_other_figures() -> None:
    n = np.random.default_rng(0).integers(5, 90, (40, 2))
    k = n // np.arange(2, 42)[:, None]
    both = cluster_bootstrap(k, n, seed=3)
    assert both == cluster_bootstrap(k, n, seed=3)
    assert both != cluster_bootstrap(k, n, seed=4)
    assert both[0] == cluster_bootstrap(k[:, :1], n[:, :1], seed=3)[0]


def test_bootstrap_says_nothing_where_clusters_say_nothing() -> None:
    assert cluster_bootstrap([[1.0]], [[2.0]]) == [None]
    assert cluster_bootstrap([[1.0], [0.0]], [[2.0], [0.0]]) == [None]
    assert cluster_bootstrap([[2.0], [4.0]], [[2.0], [4.0]]) == [None]
    assert cluster_bootstrap([[0.0], [0.0]], [[2.0], [4.0]]) == [None]
    assert cluster_bootstrap(np.zeros((0, 2)), np.zeros((0, 2))) == [None, None]
    with pytest.raises(InputError):
        cluster_bootstrap([[1.0]], [[1.0, 2.0]])
    with pytest.raises(InputError):
        cluster_bootstrap([[1.0]], [[1.0]], resamples=0)


def test_bootstrap_leaves_out_resamples_without_the_figure() -> None:
    # most resamples draw neither of the two clusters that have a denominator, none must be NaN
    k, n = np.zeros((30, 1)), np.zeros((30, 1))
    k[0], n[:2] = 3, 4
    found = cluster_bootstrap(k, n)[0]
    assert found is not None
    assert (found.value, found.lo, found.hi) == (0.375, 0.0, 0.75)


def test_bootstrap_of_1000_prompts_is_quick() -> None:
    rng = np.random.default_rng(0)
    n = rng.integers(1, 100, (1000, 40))
    k = rng.binomial(n, 0.5)
    start = time.process_time()
    cluster_bootstrap(k, n, resamples=2000)
    assert time.process_time() - start < 3  # about 0.3 s on an idle machine


def test_greenwood_textbook_example() -> None:
    # Remission of the 6-MP arm (Freireich et al. 1963), as in Kalbfleisch & Prentice: 21 at
    # risk, 3 events at 6 weeks; then 17/1, 15/1, 12/1, 11/1, 7/1, 6/1
    risk = [21, 17, 15, 12, 11, 7, 6]
    events = [3, 1, 1, 1, 1, 1, 1]
    found = greenwood([n - d for n, d in zip(risk, events, strict=True)], risk)
    survival = [0.8571, 0.8067, 0.7529, 0.6902, 0.6275, 0.5378, 0.4482]
    errors = [0.0764, 0.0869, 0.0963, 0.1068, 0.1141, 0.1282, 0.1346]
    for interval, s, error in zip(found, survival, errors, strict=True):
        assert interval is not None
        assert interval.value == pytest.approx(s, abs=1e-4)
        # the published standard error, through the log(-log) transform by hand
        spread = math.exp(1.96 * error / (s * -math.log(s)))
        assert interval.lo == pytest.approx(s**spread, abs=3e-3)
        assert interval.hi == pytest.approx(s ** (1 / spread), abs=3e-3)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=16), st.integers(1, 300))
def test_greenwood_stays_inside(drops: list[int], start: int) -> None:
    reached, accepted, n = [], [], start
    for i in range(0, len(drops) - 1, 2):
        reached.append(n)
        accepted.append(max(0, n - drops[i]))
        n = max(0, accepted[-1] - drops[i + 1] % 7)
    found = greenwood(accepted, reached)
    assert len(found) == len(accepted)
    last = 1.0
    for interval, n in zip(found, reached, strict=True):
        if n == 0:
            assert interval is None
            continue
        assert interval is not None
        assert 0 <= interval.lo <= interval.value <= interval.hi <= 1
        assert interval.value <= last
        last = interval.value


def test_greenwood_at_the_ends() -> None:
    all_accepted = greenwood([10, 8], [10, 8])
    assert all_accepted == [wilson(10, 10), wilson(8, 8)]
    none = greenwood([5, 0, 0], [10, 5, 0])
    upper, step = none[0], wilson(0, 5)
    assert upper is not None
    assert step is not None
    assert none[1] == Interval(0.0, 0.0, upper.hi * step.hi)
    assert none[2] is None
    assert greenwood([], []) == []
    with pytest.raises(ValueError, match=r"shorter|longer"):
        greenwood([1], [])
