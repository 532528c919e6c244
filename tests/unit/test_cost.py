"""Costs: interpolation, what a run takes, and files, also those written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtpstats.cost import Costs, Curve, Point
from mtpstats.errors import InputError

HAND = {
    "schema": "mtpstats.cost/1",
    "verify": {"1": 0.030, "2": 0.032, "8": 0.044, "9": 0.080},
    "draft": {"1": 0.002, "3": 0.004},
    "comment": "a GPU I read about",
}


def at(seconds: float, **fields: float) -> Point:
    return Point(**{"median": seconds, "low": seconds, "high": seconds, "mean": seconds, **fields})


def test_between_points_a_line_beyond_them_the_last_one_goes_on() -> None:
    costs = Costs.from_dict(HAND)
    assert costs.verify([1, 2, 3, 5, 8, 9]).tolist() == pytest.approx(
        [0.030, 0.032, 0.034, 0.038, 0.044, 0.080]
    )
    # From 2, the last that is no more than half of 9, to 9: 0.048 for 7 rows, not the cliff at 9.
    assert costs.verify([10, 12]).tolist() == pytest.approx([0.080 + 0.048 / 7, 0.080 + 0.144 / 7])
    assert costs.draft(2) == pytest.approx(0.003)
    assert costs.verify(0) == 0
    assert costs.measured(9, 3)
    assert not costs.measured(10, 3)
    assert not costs.measured(9, 4)


def test_a_curve_of_one_point_is_flat_and_none_falls_beyond_its_end() -> None:
    assert Curve({1: at(0.5)})([1, 2, 40]).tolist() == [0.5, 0.5, 0.5]
    assert Curve({1: at(0.5), 2: at(0.4)})([2, 3, 40]).tolist() == pytest.approx([0.4, 0.4, 0.4])


def test_what_a_run_takes() -> None:
    costs = Costs(
        verify=Curve({1: at(10), 3: at(14)}),
        follow=Curve({1: at(1), 2: at(3)}),
        draft=Curve({1: at(2), 2: at(5)}),
        other_verification=0.5,
        other_draft=0.25,
        other_token=0.125,
        other_plain=0.0625,
    )
    # First run: 4 passes of 1 row and 2 of 3; second: 1 of 2 rows.
    rows = [[0, 4, 0, 2], [0, 0, 1, 0]]
    # First run: 3 steps of 1 row, 1 of 2; second: none.
    widths = [[9, 3, 1], [7, 0, 0]]  # no step has 0 rows, so these take nothing
    first = 4 * (10 + 1 + 0.5) + 2 * (14 + 5 + 0.5) + 3 * (2 + 0.25) + (5 + 0.25) + 0.125 * 8
    assert costs.seconds(rows, widths, [8, 2]).tolist() == [first, 12 + 3 + 0.5 + 0.125 * 2]
    assert costs.without([8, 0]).tolist() == [8 * (10 + 0.0625 + 0.125), 0]
    # A target without a head, where that was measured.
    alone = replace(costs, plain=Curve({1: Point.of([6, 7, 11])}))
    assert alone.without([8, 0]).tolist() == [8 * (7 + 0.0625 + 0.125), 0]
    assert alone.averaged().without([8]).tolist() == [8 * (8 + 0.0625 + 0.125)]


def test_a_point_is_median_quartiles_and_mean_of_its_samples() -> None:
    point = Point.of([4.0, 1.0, 2.0, 3.0, 10.0])
    assert (point.low, point.median, point.high, point.mean, point.samples) == (2, 3, 4, 4, 5)
    # Normal samples: a quarter of the IQR's 1.349 deviations, times 1.2533 for a median.
    assert point.error == pytest.approx(1.2533 * 2 / 1.349 / 5**0.5)


def test_resampling_spreads_by_the_standard_error_and_leaves_exact_points() -> None:
    point = Point(median=10, low=8, high=12, mean=11, samples=9)
    costs = Costs(verify=Curve({1: point, 2: at(20)}), draft=Curve({1: at(1)}))
    rng = np.random.default_rng(0)
    drawn = np.array([costs.resampled(rng).verify([1, 2]) for _ in range(4000)])
    assert drawn[:, 0].std() == pytest.approx(point.error, rel=0.05)
    assert drawn[:, 0].mean() == pytest.approx(10, abs=0.1)
    assert (drawn[:, 1] == 20).all()
    assert costs.averaged().verify(1) == 11
    assert costs.averaged().draft(1) == 1


def test_the_statistic_that_explains_real_runs_is_taken() -> None:
    def costs(by_medians: float, by_means: float) -> Costs:
        check = {"1": {"measured": 4.0, "by_medians": by_medians, "by_means": by_means}}
        curve = Curve({1: Point(median=1, low=1, high=2, mean=3, samples=5)})
        return Costs(verify=curve, draft=curve, facts={"check": check})

    assert costs(3.0, 3.5).fitting().verify(1) == 3
    assert costs(4.5, 3.0).fitting().verify(1) == 1
    # Half of it is as wrong as twice of it, and a tie goes to the median.
    assert costs(2.0, 8.0).fitting().verify(1) == 1
    assert Costs.from_dict(HAND).fitting().verify(1) == 0.030


def test_costs_are_scaled_to_real_runs() -> None:
    check = {
        "0": {"measured": 3.0, "by_medians": 2.0, "by_means": 8.0},
        "1": {"measured": 5.0, "by_medians": 5.0, "by_means": 9.0},
        "4": {"measured": 7.0, "by_medians": 5.0, "by_means": 9.0},
    }
    costs = Costs(
        verify=Curve({1: Point(10.0, 5.0, 15.0, 20.0, 7)}),
        draft=Curve({1: at(5)}),
        plain=Curve({1: at(8)}),
        other_plain=2.0,
        other_token=1.0,
        facts={"check": check},
    )
    # Drafting took 12 s where medians make 10, plain decoding 3 where they make 2.
    found = costs.calibrated()
    assert found.verify.points[1] == Point(12.0, 6.0, 18.0, 24.0, 7)
    assert (found.draft(1), found.other_token) == (6, 1.2)
    assert (found.plain and found.plain(1), found.other_plain) == (12, 3)
    assert replace(costs, facts={}).calibrated().verify(1) == 10


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    costs = Costs(
        verify=Curve({2: Point.of([3.0, 4.0]), 1: Point.of([1.0, 2.0])}),
        draft=Curve({1: at(1)}),
        follow=Curve({1: at(0)}),
        other_verification=0.25,
        n_past=77,
        facts={
            "model": {"file": "m.gguf"},
            "check": {"1": {"measured": 2.0, "by_medians": 1.0, "by_means": 2.5}},
        },
    )
    costs.save(path)
    back = Costs.load(path)
    assert back.to_dict() == costs.to_dict()
    assert back.verify.points == {
        1: Point(1.5, 1.25, 1.75, 1.5, 2),
        2: Point(3.5, 3.25, 3.75, 3.5, 2),
    }
    assert (back.n_past, back.facts) == (77, costs.facts)
    assert back.follow is not None
    assert Costs.from_dict(HAND).follow is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": "mtpstats.cost/2"}, "schema 'mtpstats.cost/2' is unknown"),
        ({"verify": None}, "verify is null, expected seconds by rows"),
        ({"verify": {}}, "verify is {}, expected"),
        ({"verify": {"2": 1}}, "verify has no entry for 1 row"),
        ({"verify": {"1": 1, "0": 1}}, 'verify has "0", expected a number of rows'),
        ({"verify": {"1": 1, "2.5": 1}}, 'verify has "2.5"'),
        ({"verify": {"1": 1, "\x1b[2J": 1}}, r"verify has \"\\u001b\[2J\""),
        ({"verify": {"1": 1, "9" * 5000: 1}}, "verify has "),
        ({"verify": {"1": -1}}, r"verify\[1\] is -1, expected seconds, 0 or more"),
        ({"verify": {"1": 1e300}}, r"verify\[1\] is 1e\+300"),
        ({"verify": {"1": 0}}, r"verify\[1\] is 0: nothing takes no time"),
        ({"verify": {"1": "30 ms"}}, r'verify\[1\] is "30 ms", expected seconds'),
        ({"verify": {"1": True}}, r"verify\[1\] is true"),
        ({"verify": {"1": {"low": 1}}}, r"verify\[1\] has no median"),
        ({"verify": {"1": {"median": 1, "low": 2}}}, r"verify\[1\]: low, median and high"),
        ({"verify": {"1": {"median": 1, "samples": 0}}}, r"verify\[1\].samples is 0"),
        ({"check": []}, r"check is \[\], expected runs"),
        ({"check": {"1": {"measured": 1}}}, r"check\[1\].by_medians is null"),
        ({"other_token": "no"}, 'other_token is "no"'),
        ({"n_past": -1}, "n_past is -1, expected a number of tokens"),
        ({"verfy": {"1": 1}}, "verfy is no key of a cost file; it may have check, comment, draft,"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    path = tmp_path / "hand.json"
    path.write_text(json.dumps({**HAND, **changes}))
    with pytest.raises(InputError, match=rf"^{path}: {words}") as caught:
        Costs.load(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a cost file: "),
        ("[1]", 'no cost file: it has no "schema"'),
        ('{"schema": "mtpstats.cost/1", "draft": {"1": 1}}', "verify is missing"),
        ('{"schema": "mtpstats.cost/1", "verify": {"1": 1}}', "draft is missing"),
        ('{"schema": "mtpstats.cost/1", "verify": {"1": NaN}}', "NaN is not JSON"),
    ],
)
def test_what_is_no_cost_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        Costs.load(path)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Costs.load(tmp_path / "none.json")


def test_trees_are_scaled_to_real_runs_of_a_tree() -> None:
    check = {
        "1": {"measured": 6.0, "by_medians": 5.0, "by_means": 9.0},
        "tree_target": {"measured": 9.0, "by_medians": 5.0, "by_means": 5.5},
        "tree_rest": {"measured": 3.0, "by_medians": 5.0, "by_means": 5.5},
    }
    curve = Curve({1: Point(10.0, 5.0, 15.0, 20.0, 7)})
    costs = Costs(verify=curve, draft=curve, facts={"check": check})
    # Medians explain the chain better; what trees take does not decide it.
    found = costs.calibrated()
    assert found.verify(1) == pytest.approx(12)
    # On top of the 1.2 that all costs are scaled by.
    assert (found.tree_target, found.tree_rest) == (
        pytest.approx(1.8 / 1.2), pytest.approx(0.6 / 1.2)
    )  # fmt: skip
    bare = Costs(verify=curve, draft=curve).calibrated()
    assert (bare.tree_target, bare.tree_rest) == (1, 1)
    assert Costs.from_dict(costs.to_dict()).calibrated().tree_target == found.tree_target
