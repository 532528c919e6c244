"""Curves, the cost file, and what is refused in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpstats.cost import Costs, Curve
from mtpstats.errors import InputError

BY_HAND = {
    "schema": "mtpstats.cost/1",
    "verify": {"1": 0.010, "2": 0.012, "4": [0.013, 0.020, 0.014]},
    "draft": {"1": 0.002},
}


def test_between_points_a_straight_line_and_at_them_the_median() -> None:
    curve = Curve({4: [13.0, 20.0, 14.0], 1: [10.0], 2: [12.0]})
    assert curve.at([1, 2, 3, 4]).tolist() == [10, 12, 13, 14]
    assert curve.last == 4


def test_beyond_the_last_point_it_goes_on_but_never_down() -> None:
    assert Curve({1: [1.0], 2: [5.0], 4: [6.0]}).at([6, 8]).tolist() == [7, 8]
    assert Curve({1: [1.0], 2: [5.0], 4: [3.0]}).at([3, 6, 100]).tolist() == [4, 3, 3]
    assert Curve({1: [2.5]}).at([1, 7]).tolist() == [2.5, 2.5]


def test_draws_are_medians_of_what_was_measured() -> None:
    curve = Curve({1: [9.0, 11.0], 2: [20.0]})
    drawn = curve.draws(4000, np.random.default_rng(0))
    assert drawn.shape == (4000, 2)
    values, counts = np.unique(drawn[:, 0], return_counts=True)
    assert values.tolist() == [9, 10, 11]  # both the one, one of each, both the other
    assert counts / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert (drawn[:, 1] == 20).all()
    assert curve.at([3], drawn)[0].tolist() == [20 + (20 - drawn[0, 0])]


def write(path: Path, record: Any) -> Path:
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    costs = Costs.load(write(tmp_path / "c.json", BY_HAND))
    assert costs.verify.at([1, 3, 4]).tolist() == pytest.approx([0.010, 0.013, 0.014])
    assert costs.draft.at([1, 5]).tolist() == [0.002, 0.002]
    # Not given: a pass over verified rows costs what a draft step does.
    assert costs.follow.at([1, 9]).tolist() == [0.002, 0.002]
    assert (costs.other_verification, costs.other_token, costs.context) == (0, 0, None)


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    record = BY_HAND | {
        "follow": {"1": 0},
        "other_verification": 1e-4,
        "other_token": 1e-5,
        "context": 512,
        "model": {"sha256": "ab"},
    }
    costs = Costs.load(write(tmp_path / "a.json", record))
    costs.save(tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text()) == record
    assert Costs.load(tmp_path / "b.json").to_dict() == record


def test_measurements_of_several_rounds_are_one() -> None:
    a = Costs(Curve({1: [1.0], 2: [2.0]}), Curve({1: [1.0]}), Curve({1: [0.0]}), 1.0, 5.0)
    b = Costs(Curve({1: [3.0, 9.0]}), Curve({1: [1.0]}), Curve({1: [0.0]}), 2.0, 5.0)
    both = Costs.merge([a, b])
    assert both.to_dict()["verify"] == {"1": [1.0, 3.0, 9.0], "2": 2.0}
    assert (both.other_verification, both.other_token) == (1.5, 5.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "mtpstats.cost/9"}, "schema 'mtpstats.cost/9' is unknown"),
        ({"verify": None}, "verify is missing"),
        ({"draft": None}, "draft is missing"),
        ({"verify": [1]}, r"verify is \[1\], expected an object"),
        ({"verify": {"2": 0.1}}, 'verify: "1" is missing'),
        ({"verify": {"1": 0}}, "verify has a pass that takes no time"),
        ({"verify": {"1": -1}}, "verify has '1': -1"),
        ({"verify": {"1": []}}, r"verify has '1': \[\]"),
        ({"verify": {"1": True}}, "verify has '1': True"),
        ({"verify": {"one": 1}}, "verify has 'one': 1"),
        ({"verify": {"1": 1, "9999": 1}}, "verify: 9999 rows"),
        ({"draft": {"1": 1e999}}, "draft has '1': inf"),
        ({"other_token": "1"}, "other_token is '1', expected seconds"),
        ({"context": -1}, "context is -1"),
        ({"model": []}, r"model is \[\], expected an object"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        Costs.load(write(tmp_path / "c.json", BY_HAND | change))
    assert str(caught.value).startswith(str(tmp_path / "c.json") + ": ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "not a cost file"), (b"\xff", "not a cost file"), (b"[]", 'has no "schema"')],
)
def test_what_is_no_cost_file(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        Costs.load(path)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Costs.load(tmp_path / "absent.json")
