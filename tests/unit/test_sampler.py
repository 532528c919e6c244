"""The sampler against a plain-Python reference that follows llama.cpp's definitions."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpstats import _core
from mtpstats.errors import InputError

LOGITS = st.one_of(
    st.floats(-12, 12, width=32),
    st.sampled_from([0.0, 1.0, 1.0, math.nan, math.inf, -math.inf]),
)


def wide(seed: int) -> list[float]:
    """300 logits with ties, more than the sampler's sorted list holds."""
    rng = np.random.default_rng(seed)
    row = np.round(rng.normal(0, 2, 300), rng.integers(0, 3)).astype(np.float32)
    row[rng.integers(0, 300, 3)] = (np.nan, -np.inf, np.inf)
    return row.tolist()


ROWS = st.one_of(st.lists(LOGITS, min_size=1, max_size=25), st.builds(wide, st.integers(0, 999)))


def draw(
    row: list[float], temp: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> tuple[int, float, int]:
    array = np.array(row, np.float32)
    sampler = _core.Sampler(temp, top_k, top_p, min_p, seed)
    token = sampler.sample_at(array.ctypes.data, len(array), position)
    return token, sampler.margin, sampler.n_nan


@settings(max_examples=200, deadline=None)
@given(
    row=ROWS,
    temp=st.sampled_from([0.0, -1.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 10, 40, 256, 257, 300, 1000]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.95, 0.999, 1.0, 1.5]),
    min_p=st.sampled_from([0.0, -1.0, 0.01, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
)
def test_sampler_equals_the_reference(
    row: list[float],
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> None:
    token, margin, n_nan = draw(row, temp, top_k, top_p, min_p, seed, position)
    exact = np.array(row, np.float32).tolist()
    u = reference.uniform(seed, position)
    expected, expected_margin = reference.sample(exact, temp, top_k, top_p, min_p, u)
    assert n_nan == reference.bad(exact)
    # rounding may move a draw over an edge, or an entry over the line top_p or min_p draws; a
    # nearly equal margin tells that apart from an error
    assert margin == pytest.approx(expected_margin, abs=1e-9) or expected_margin < 1e-9
    assert token == expected or expected_margin < 1e-9


def test_draws_depend_on_seed_and_position_only() -> None:
    # splitmix64 written out by hand for (0, 0): mix(mix(step) + step)
    assert _core.uniform(0, 0) == reference.uniform(0, 0)
    values = [_core.uniform(s, p) for s in (0, 1, 2**64 - 1) for p in (0, 1, 1000, 2**63)]
    assert len(set(values)) == 12
    assert all(0 <= v < 1 for v in values)
    row = list(np.random.default_rng(0).standard_normal(50))
    first = [draw(row, 1.0, 0, 1.0, 0.0, 9, p)[0] for p in range(50)]
    assert first == [draw(row, 1.0, 0, 1.0, 0.0, 9, p)[0] for p in range(50)]
    assert first != [draw(row, 1.0, 0, 1.0, 0.0, 10, p)[0] for p in range(50)]


def test_draws_are_uniform() -> None:
    values = np.array([_core.uniform(5, p) for p in range(20_000)])
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    # chi-square with 19 degrees of freedom: 43.8 is its 99.9 % point
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_frequencies_are_the_probabilities() -> None:
    p = [0.6, 0.3, 0.1]
    row = np.log(np.array(p, np.float32))
    sampler = _core.Sampler(1.0, 0, 1.0, 0.0, 123)
    n = 20_000
    seen = Counter(sampler.sample_at(row.ctypes.data, 3, i) for i in range(n))
    for token, share in enumerate(p):
        assert seen[token] / n == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / n))


def test_temperature_divides_after_the_cuts() -> None:
    # top_p 0.75 of [.5, .3, .2] keeps two; at temperature 0.5 they weigh .25 and .09
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampler = _core.Sampler(0.5, 0, 0.75, 0.0, 1)
    n = 20_000
    seen = Counter(sampler.sample_at(row.ctypes.data, 3, i) for i in range(n))
    assert set(seen) == {0, 1}
    assert seen[0] / n == pytest.approx(0.25 / 0.34, abs=0.015)


def test_min_p_keeps_what_has_that_share_of_the_best() -> None:
    row = np.log(np.array([0.5, 0.26, 0.24], np.float32))
    sampler = _core.Sampler(5.0, 0, 1.0, 0.5, 1)
    assert {sampler.sample_at(row.ctypes.data, 3, i) for i in range(300)} == {0, 1}


def test_greedy_takes_the_lower_of_equal_ids_and_gives_the_gap() -> None:
    assert draw([1.0, 3.0, 3.0], 0.0, 40, 0.95, 0.05, 0, 0) == (1, 0.0, 0)
    assert draw([1.0, 3.5, 3.0], 0.0, 1, 0.1, 0.9, 0, 0) == (1, 0.5, 0)
    assert draw([math.nan, 2.0], 0.0, 0, 1.0, 0.0, 0, 0) == (1, math.inf, 1)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 40, 1000])
def test_no_finite_logit_gives_no_token(temp: float, top_k: int) -> None:
    assert draw([math.nan, math.inf, -math.inf], temp, top_k, 0.9, 0.1, 0, 0) == (-1, 0.0, 2)


@pytest.mark.parametrize("top_k", [0, 40, 1000])
def test_padding_is_never_drawn(top_k: int) -> None:
    row = np.zeros(500, np.float32)
    row[100:] = 50
    sampler = _core.Sampler(1.0, top_k, 1.0, 0.0, 3)
    drawn = {sampler.sample_at(row.ctypes.data, 500, i, 100) for i in range(200)}
    assert max(drawn) < 100
    assert len(drawn) > 20


def test_margin_is_the_distance_to_the_nearest_edge() -> None:
    row = np.log(np.array([0.5, 0.25, 0.25], np.float32))
    sampler = _core.Sampler(1.0, 0, 1.0, 0.0, 77)
    for position in range(50):
        token = sampler.sample_at(row.ctypes.data, 3, position)
        u = _core.uniform(77, position)
        edges = [0.0, 0.5, 0.75, 1.0]
        assert edges[token] <= u < edges[token + 1]
        assert sampler.margin == pytest.approx(min(abs(u - e) for e in edges), abs=1e-7)


def test_a_wide_list_and_the_heap_agree() -> None:
    row = np.random.default_rng(2).standard_normal(5000).astype(np.float32)
    # all entries of weight above top_p's cut are in the first 256, so both ways draw alike
    row[:100] += 12
    listed = _core.Sampler(0.8, 256, 0.9, 0.0, 4)
    heaped = _core.Sampler(0.8, 257, 0.9, 0.0, 4)
    for position in range(200):
        a = listed.sample_at(row.ctypes.data, 5000, position)
        assert a == heaped.sample_at(row.ctypes.data, 5000, position)


def test_bad_settings_are_refused() -> None:
    for bad in (math.nan, math.inf):
        for settings_ in ((bad, 1.0, 0.0), (1.0, bad, 0.0), (1.0, 1.0, bad)):
            with pytest.raises(InputError, match="finite"):
                _core.Sampler(settings_[0], 40, settings_[1], settings_[2], 0)
    sampler = _core.Sampler(1.0, 40, 1.0, 0.0, 0)
    with pytest.raises(InputError, match="NULL"):
        sampler.sample_at(0, 3, 0)
    with pytest.raises(OverflowError):
        _core.Sampler(1.0, 40, 1.0, 0.0, 2**64)
