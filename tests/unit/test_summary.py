"""Derived figures against hand-made counters."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from mtpstats.categories import by_category
from mtpstats.errors import InputError
from mtpstats.intervals import wilson
from mtpstats.stats import Collector, Snapshot, repeated_4grams
from mtpstats.summary import Known, Summary, expected_length, summarise
from mtpstats.verdict import deeper_or_wider


def counted(
    verifications: int,
    *positions: tuple[int, int, int, int, int],
) -> Snapshot:
    """Counters from (drafted, reached, accepted = rank 1, rank 2, stopped) by position."""
    s = Snapshot()
    s.verifications = verifications
    for i, (drafted, reached, accepted, second, stopped) in enumerate(positions):
        s.drafted[i], s.reached[i], s.accepted[i] = drafted, reached, accepted
        s.rank[i, :2] = accepted, second
        s.miss[i] = reached - accepted - second
        s.stopped[i] = stopped
        s.sum_p_units[i, :2] = (reached << 23, reached << 21)  # means 0.5 and 0.125
    return s


def value(estimate: object) -> float:
    assert isinstance(estimate, tuple)
    assert estimate[1] <= estimate[0] <= estimate[2]
    return float(estimate[0])


def test_figures_of_one_run() -> None:
    s = counted(200, (200, 200, 120, 30, 0), (180, 110, 44, 22, 20))
    s.rank[0, 2], s.miss[0] = 10, 40
    s.stopped_reached[1], s.stopped_hit[1] = 10, 4
    s.censored[0, 2] = 40
    found = summarise(s, tokens=410)
    assert (found.drafted, found.accepted, found.tokens) == (380, 164, 410)
    assert value(found.acceptance) == 164 / 380
    assert value(found.acceptance_length) == 1 + 164 / 200
    assert value(found.coverage) == 380 / 410
    assert value(found.drafted_per_verification) == 380 / 200
    assert value(found.expected_length) == pytest.approx(1 + 0.6 + 0.6 * 0.4)
    first, second = found.positions
    assert (first.number, second.number) == (1, 2)
    assert first.acceptance == wilson(120, 200)
    assert value(second.acceptance) == 44 / 110
    assert value(second.unconditional) == 44 / 200
    assert value(second.survival) == pytest.approx(0.6 * 0.4)
    assert [value(r) for r in first.recall[:4]] == [0.6, 0.75, 0.8, 0.8]
    assert value(first.ranks[2]) == 10 / 200
    assert value(first.miss) == 40 / 200
    assert value(second.rank2) == 22 / 110
    assert value(second.widening) == 22 / 200
    assert value(second.p1) == 0.5
    assert value(second.p2) == 0.125
    assert second.mean_p[0] == 0.5
    assert value(second.stopped_hit) == 0.4
    assert first.stopped_hit is None
    assert second.censored == {"n_max": 0, "budget": 0, "context": 0, "end": 0}
    assert found.warnings == ()
    assert found.loops is None


def test_what_a_source_does_not_hold_is_missing_not_zero() -> None:
    # per-position acceptance only, as a server prints it: 10 verifications, 6 and 3 accepted
    s = Snapshot()
    s.verifications = 10
    s.reached[:2], s.accepted[:2] = (10, 6), (6, 3)
    names = {"drafted", "rank", "miss", "sum_p", "sum_p_top10", "calib_p1", "calib_p2"}
    names |= {"stopped", "stopped_hit", "stopped_reached", "censored"}
    found = summarise(s, [s], [21], known=Known([18], [9], frozenset(names)))
    assert (found.verifications, found.drafted, found.accepted) == (10, 18, 9)
    assert value(found.acceptance) == 9 / 18
    assert value(found.acceptance_length) == 1.9
    assert found.coverage is not None
    assert found.coverage.value == 18 / 21
    assert math.isnan(found.coverage.lo)  # how drafts varied is not known
    first, second = found.positions
    assert value(first.acceptance) == 0.6
    assert value(second.acceptance) == 0.5
    assert value(second.unconditional) == 0.3
    for position in found.positions:
        missing = [position.drafted, position.rank_counts, position.miss, position.rank2]
        missing += [position.p1, position.p2_top10, position.widening, position.recall[1]]
        missing += [position.stopped, position.stopped_hit, position.censored]
        missing += [position.calibration1, position.mean_p[0]]
        assert missing == [None] * len(missing)
    assert "holds no ranks" in deeper_or_wider(found)


def test_lengths_without_any_position() -> None:
    parts = [Snapshot() for _ in range(3)]
    for part, n in zip(parts, (10, 20, 30), strict=True):
        part.verifications = n
    names = frozenset(name for name in Snapshot().to_dict() if name != "verifications")
    known = Known([20, 40, 60], [5, 18, 30], names)
    found = summarise(Snapshot.merge(*parts), parts, [15, 38, 60], known=known)
    assert found.positions == ()
    assert value(found.acceptance) == 53 / 120
    assert value(found.acceptance_length) == 1 + 53 / 60
    assert value(found.coverage) == 120 / 113
    alone = summarise(parts[0], parts[:1], [15], known=Known([20], [5], names))
    assert alone.acceptance_length is not None
    assert alone.acceptance_length.value == 1.5
    assert math.isnan(alone.acceptance_length.hi)
    timeless = Known([20], [5], names | {"verifications"})
    found = summarise(Snapshot(), [Snapshot()], [15], known=timeless)
    assert found.verifications is found.acceptance_length is None
    assert value(found.acceptance) == 0.25


def test_survival_is_not_depressed_by_short_drafts() -> None:
    # half of the drafts were cut to one token; those that went on were accepted as often
    s = counted(100, (100, 100, 80, 0, 0), (50, 40, 32, 0, 0))
    position = summarise(s).positions[1]
    assert value(position.survival) == pytest.approx(0.64)
    assert value(position.unconditional) == 0.32


def test_length_interval_from_the_distribution() -> None:
    # accepted lengths 0, 1, 2 in equal parts: variance 2/3
    s = counted(300, (300, 300, 200, 0, 0), (300, 200, 100, 0, 0))
    found = summarise(s).acceptance_length
    assert found is not None
    half = 1.959964 * math.sqrt(2 / 3 / 300)
    assert found == pytest.approx((2.0, 2.0 - half, 2.0 + half), abs=1e-6)


def test_intervals_come_from_the_prompts_when_they_are_known() -> None:
    rng = np.random.default_rng(5)
    parts = [
        counted(50, (50, 50, int(k), int((50 - k) // 2), 0))
        for k in rng.binomial(50, rng.beta(2, 2, 60))
    ]
    total = Snapshot.merge(*parts)
    alone, grouped = summarise(total), summarise(total, parts)
    assert grouped.prompts == 60
    for name in ("acceptance", "acceptance_length", "coverage"):
        a, b = getattr(alone, name), getattr(grouped, name)
        assert a[0] == b[0]
        assert a[1:] != b[1:]
    a, b = alone.positions[0], grouped.positions[0]
    for name in ("acceptance", "unconditional", "widening", "rank2"):
        narrow, wide = getattr(a, name), getattr(b, name)
        assert narrow[0] == wide[0]
        assert wide[2] - wide[1] > 1.5 * (narrow[2] - narrow[1])
    assert summarise(total, parts) == grouped
    assert summarise(total, parts, seed=1) != grouped
    # one prompt cannot vary; equal prompts do not
    assert summarise(parts[0], parts[:1]).acceptance == summarise(parts[0]).acceptance
    same = summarise(parts[0] + parts[0], [parts[0], parts[0]])
    assert same.acceptance == summarise(parts[0] + parts[0]).acceptance


def test_a_prompt_without_drafts_does_no_harm() -> None:
    parts = [counted(50, (50, 50, 20, 9, 0)), counted(50, (50, 50, 30, 9, 0)), Snapshot()]
    found = summarise(Snapshot.merge(*parts), parts, tokens=[70, 80, 0], loops=[0.1, None, None])
    assert value(found.acceptance) == 0.5
    assert found.tokens == 150
    assert found.loops == 0.1


def test_every_estimate_contains_its_value_and_rates_stay_below_1() -> None:
    rng = np.random.default_rng(8)
    for _ in range(20):
        n = int(rng.integers(1, 50))
        a = int(rng.integers(0, n + 1))
        b = int(rng.integers(0, a + 1))
        s = counted(n, (n, n, a, int(rng.integers(0, n - a + 1)), 0), (n, a, b, 0, 0))
        found = summarise(s, [s, s + s])
        for position in found.positions:
            for field in dataclasses.fields(position):
                estimates = getattr(position, field.name)
                for estimate in estimates if isinstance(estimates, tuple) else (estimates,):
                    if isinstance(estimate, tuple) and len(estimate) == 3:
                        assert 0 <= estimate[1] <= estimate[0] <= estimate[2] <= 1


def test_bad_token_counts_are_refused() -> None:
    s = counted(10, (10, 10, 5, 0, 0))
    for tokens in (-1, [1], [1, 2, 3], [-1, 5]):
        with pytest.raises(InputError, match="token counts"):
            summarise(s + s, [s, s], tokens=tokens)


def test_nothing_drafted_at_all_gives_no_numbers() -> None:
    empty = summarise(Snapshot())
    for name in ("acceptance", "acceptance_length", "coverage", "expected_length"):
        assert getattr(empty, name) is None
    assert empty.positions == ()
    assert empty.warnings == ()


# ---- warnings


def test_loops_warn_above_30_percent() -> None:
    s = counted(10, (10, 10, 5, 0, 0))
    assert summarise(s, loops=0.30).warnings == ()
    assert "the text loops" in summarise(s, loops=0.31).warnings[0]
    found = summarise(s, loops=[0.1, 0.9, None, 0.5])
    assert "2 of 3 texts loop (up to 90%" in found.warnings[0]
    assert found.loops == 0.9


def test_repeated_4grams() -> None:
    assert repeated_4grams([1, 2, 3, 4, 1, 2, 3, 4]) == 1 / 5
    assert repeated_4grams([7] * 8) == 4 / 5
    assert repeated_4grams(range(100)) == 0.0
    assert repeated_4grams([1, 2, 3]) is None
    assert repeated_4grams([]) is None


def test_broken_head() -> None:
    assert "broken" in summarise(counted(633, (633, 633, 1, 0, 0))).warnings[0]
    assert summarise(counted(199, (199, 199, 1, 0, 0))).warnings == ()
    assert summarise(counted(200, (200, 200, 40, 20, 0))).warnings == ()
    assert "broken" in summarise(counted(200, (200, 200, 39, 20, 0))).warnings[0]
    assert "second 40" in summarise(counted(100, (100, 100, 40, 40, 0))).warnings[0]
    assert summarise(counted(5, (5, 5, 1, 2, 0))).warnings == ()


def test_invalid_rounds_and_padding_warn() -> None:
    s = counted(10, (10, 10, 5, 0, 0))
    s.invalid, s.padded_rows = 3, 4
    warnings = summarise(s).warnings
    assert "3 rounds" in warnings[0]
    assert "4 rows" in warnings[1]


# ---- the sentence


def test_wider_when_a_leaf_earns_more_than_the_deepest_position() -> None:
    s = counted(1000, (1000, 1000, 600, 200, 0), (1000, 600, 200, 100, 0), (1000, 200, 40, 30, 0))
    text = deeper_or_wider(summarise(s))
    assert text.startswith("Wider rather than deeper: a rank-2 leaf at position 1 would add 0.200")
    assert "position 3, the deepest drafted, adds 0.040" in text


def test_deeper_when_the_deepest_position_earns_more() -> None:
    s = counted(1000, (1000, 1000, 900, 30, 0), (1000, 900, 800, 40, 0))
    text = deeper_or_wider(summarise(s))
    assert text.startswith("Deeper rather than wider: position 2, the deepest drafted, adds 0.800")
    assert "rank-2 leaf at position 2 would add 0.040" in text


def test_it_does_not_tell_what_the_run_does_not() -> None:
    assert "Nothing was drafted" in deeper_or_wider(summarise(Snapshot()))
    few = counted(99, (99, 99, 90, 1, 0))
    assert "99 verifications are too few" in deeper_or_wider(summarise(few))
    close = counted(1000, (1000, 1000, 500, 200, 0), (1000, 500, 210, 30, 0))
    assert deeper_or_wider(summarise(close)).startswith("Too close to tell")


def test_leave_it_when_drafting_is_slower() -> None:
    s = summarise(counted(1000, (1000, 1000, 900, 30, 0)))
    assert deeper_or_wider(s, 0.87).startswith("Leave it: with drafting this ran at 0.87 times")
    assert deeper_or_wider(s, 1.2).startswith("Deeper")


def test_the_sentence_is_one_line() -> None:
    for s in (Snapshot(), counted(1000, (1000, 1000, 900, 30, 0))):
        text = deeper_or_wider(summarise(s))
        assert "\n" not in text
        assert text.endswith(".")


def test_summary_is_frozen() -> None:
    found = summarise(Snapshot())
    assert isinstance(found, Summary)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.tokens = 3  # type: ignore[misc]


def test_expected_length_by_hand() -> None:
    assert expected_length([]) == 1
    assert expected_length([0.5, 0.5]) == 1.75
    assert expected_length([1.0, 0.0, 1.0]) == 2


def test_summary_of_a_live_run() -> None:
    c = Collector()
    logits = np.array([3, 2, 1, 0], np.float32)
    for i in range(10):
        c.draft(0, 2 * i, 0)
        c.candidates(0, 0, logits)
        c.finish(0, 2 * i + 1 + (i < 6), 1)
    found = summarise(c.snapshot())
    assert value(found.acceptance) == 0.6
    assert value(found.positions[0].widening) == 0.4
    assert value(found.positions[0].p1) == pytest.approx(0.6439, abs=1e-4)


def test_categories_are_summed_apart_and_the_largest_comes_first() -> None:
    parts = [
        counted(10, (10, 10, 8, 1, 0), (10, 8, 4, 2, 0)),
        counted(30, (30, 30, 15, 9, 0), (20, 15, 6, 3, 0)),
        counted(10, (10, 10, 6, 3, 0), (8, 6, 3, 1, 0)),
        counted(4, (0, 0, 0, 0, 0)),
    ]
    first, second, third = by_category(["b", "a", "b", None], parts, [22, 51, 19, 4])
    assert (first.name, first.prompts, first.tokens) == ("b", 2, 41)
    assert value(first.acceptance) == 14 / 20
    assert value(first.rank2) == 4 / 20
    assert value(first.acceptance_length) == 1 + (12 + 9) / 20
    assert value(first.coverage) == (20 + 18) / 41
    # Two prompts show too little of how prompts differ: it is no narrower than Wilson's.
    assert first.acceptance == wilson(14, 20)
    assert (second.name, second.prompts) == ("a", 1)
    assert second.acceptance == wilson(15, 30)
    assert (third.name, third.acceptance, third.rank2) == (None, None, None)


def test_one_category_is_the_run() -> None:
    parts = [counted(10, (10, 10, 8, 1, 0)), counted(30, (30, 30, 15, 9, 0))]
    (only,) = by_category(["x", "x"], parts, [18, 45])
    run = summarise(Snapshot.merge(*parts), parts, [18, 45])
    assert only.acceptance == run.positions[0].acceptance
    assert only.rank2 == run.positions[0].rank2
    assert only.acceptance_length == run.acceptance_length
    assert only.coverage == run.coverage
