"""Snapshots: merging is exact, associative and order-free; the JSON form is strict."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpstats.errors import InputError
from mtpstats.stats import Collector, Snapshot

ARRAYS = {
    "drafted": (16,),
    "reached": (16,),
    "accepted": (16,),
    "rank": (16, 8),
    "miss": (16,),
    "stopped": (16,),
    "stopped_hit": (16,),
    "stopped_reached": (16,),
    "calib_p1": (16, 10, 2),
    "calib_p2": (16, 10, 2),
    "censored": (4, 16),
    "sum_p": (16, 8),
    "sum_p_top10": (16, 8),
}


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any counters, large ones too."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    s = Snapshot()
    s._flat[:] = rng.integers(0, draw(st.sampled_from([3, 2**30, 2**61])), s._flat.shape)
    return s


def run(choices: list[int], collector: Collector, n_past: int = 0) -> int:
    """Drafts of 3 whose outcomes follow from the choices; returns the next position."""
    logits = np.linspace(0, 3, 12).astype(np.float32)
    for choice in choices:
        collector.draft(0, n_past, 1)
        for i in range(3):
            collector.candidates(0, i, logits)
        n_past += 1 + choice % 4
        collector.finish(0, n_past, choice % 12)
    return n_past


@given(snapshots(), snapshots(), snapshots())
def test_merge_laws(a: Snapshot, b: Snapshot, c: Snapshot) -> None:
    before = [s.copy() for s in (a, b, c)]
    assert a + b == b + a
    assert (a + b) + c == a + (b + c) == Snapshot.merge(c, a, b)
    assert a + Snapshot() == a
    assert Snapshot.merge() == Snapshot()
    assert [a, b, c] == before
    assert ((a + b)._flat.astype(object) == a._flat.astype(object) + b._flat.astype(object)).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 47), max_size=30), st.integers(0, 30))
def test_merging_is_the_same_as_having_seen_everything(choices: list[int], cut: int) -> None:
    whole, first, second = Collector(), Collector(), Collector()
    run(choices, whole)
    run(choices[cut:], second, run(choices[:cut], first))
    assert first.snapshot() + second.snapshot() == whole.snapshot()


def test_sums_stay_exact_beyond_what_float64_could_add() -> None:
    big, small = Snapshot(), Snapshot()
    big.sum_p_units[0, 0] = 2**60
    small.sum_p_units[0, 0] = 1
    total = Snapshot.merge(big, *[small] * 64)
    assert int(total.sum_p_units[0, 0]) == 2**60 + 64
    assert total != big


def test_shapes_and_types() -> None:
    s = Snapshot()
    for name, shape in ARRAYS.items():
        value = getattr(s, name)
        assert value.shape == shape
        assert value.dtype == (np.float64 if name.startswith("sum_p") else np.uint64)
    s.reached[3] += np.uint64(2)
    assert s.reached[3] == 2
    with pytest.raises(ValueError, match="read-only"):
        s.sum_p[0, 0] = 1


def test_a_copy_has_memory_of_its_own() -> None:
    a = Snapshot()
    a.miss[0] = 1
    for b in (a.copy(), copy.copy(a), copy.deepcopy(a), pickle.loads(pickle.dumps(a)), a + a):
        before = b.miss[0]
        a.miss[0] += np.uint64(1)
        if b is not a:
            assert b.miss[0] == before or type(b) is Snapshot


def test_equality_looks_at_every_counter() -> None:
    names = [*ARRAYS, *reference.zeros()]
    for name in dict.fromkeys(names):
        s = Snapshot()
        target = f"{name}_units" if name.startswith("sum_p") else name
        if name in ARRAYS:
            getattr(s, target).flat[-1] = 1
        else:
            setattr(s, name, 1)
        assert s != Snapshot()
    assert Snapshot() != 3
    with pytest.raises(TypeError):
        hash(Snapshot())
    with pytest.raises(TypeError):
        Snapshot() + 3  # type: ignore[operator]
    with pytest.raises(InputError, match="int"):
        Snapshot.merge(Snapshot(), 3)  # type: ignore[arg-type]


def test_the_json_form_has_the_names_of_the_result_file_and_comes_back() -> None:
    collector = Collector()
    run([3, 14, 22, 39, 41, 8], collector)
    s = collector.snapshot()
    text = json.dumps(s.to_dict())
    data = json.loads(text)
    assert set(data) == set(reference.zeros())
    assert data["drafted"][:4] == [6, 6, 6, 0]
    assert data["verifications"] == 6
    assert data["sum_p"][0][0] == float(s.sum_p[0, 0])
    assert Snapshot.from_dict(data) == s
    data["sum_p"][0] = [int(v) if v == int(v) else v for v in data["sum_p"][0]]
    assert Snapshot.from_dict(data) == s


def test_many_are_read_as_each_alone() -> None:
    snapshots = []
    for n in range(3):
        collector = Collector()
        run([3, 14, 22, 39, 41, 8][n:], collector)
        snapshots.append(collector.snapshot())
    data = json.loads(json.dumps([s.to_dict() for s in snapshots]))
    assert Snapshot.from_dicts(data) == snapshots
    assert Snapshot.from_dicts([]) == []
    data[1]["miss"][5] = 1
    with pytest.raises(InputError, match="rank"):
        Snapshot.from_dicts(data)
    data[1] = broken(("sum_p", 0, 0), 0.1)
    with pytest.raises(InputError, match="sum_p"):
        Snapshot.from_dicts(data)
    # what was read can be counted on and does not share memory with its neighbours
    first, second = Snapshot.from_dicts([snapshots[0].to_dict(), snapshots[2].to_dict()])
    first.reached[:] = 99
    assert second == snapshots[2]


def test_null_counters_are_zeros_with_a_name() -> None:
    whole, partial = Snapshot().to_dict(), Snapshot().to_dict({"rank", "miss"})
    assert partial["rank"] is partial["miss"] is None
    partial["verifications"], partial["drafted"][0], partial["reached"][0] = 3, 3, 2
    snapshots, unknown = Snapshot.from_partial([whole, partial])
    assert unknown == {"rank", "miss"}
    assert snapshots[1].reached[0] == 2  # though no rank adds up to it
    assert not snapshots[1].rank.any()
    assert snapshots[1].to_dict(unknown) == partial
    with pytest.raises(InputError, match="rank"):
        Snapshot.from_dict(partial)
    partial["reached"][0] = 4
    with pytest.raises(InputError, match="reached"):
        Snapshot.from_partial([partial])
    with pytest.raises(InputError, match="'nan_rows' is missing"):
        Snapshot.from_partial([{k: v for k, v in partial.items() if k != "nan_rows"}])


def broken(path: tuple[Any, ...], value: object) -> dict[str, Any]:
    collector = Collector()
    run([3, 14, 22], collector)
    data = json.loads(json.dumps(collector.snapshot().to_dict()))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verifications",), -1),
        (("verifications",), 2**64),
        (("verifications",), 1.0),
        (("verifications",), True),
        (("verifications",), None),
        (("verifications",), "3"),
        (("verifications",), [3]),
        (("verifications",), float("nan")),
        (("verifications",), 0),
        (("drafted",), [1] * 15),
        (("drafted",), [1] * 17),
        (("drafted",), {"0": 1}),
        (("drafted",), 3),
        (("drafted", 2), [3]),
        (("rank", 1), [0] * 7),
        (("rank", 1, 2), 10**30),
        (("rank", 0, 0), 77),
        (("calib_p1", 3, 9), [1]),
        (("calib_p2", 3, 9, 1), 1),
        (("censored",), [[0] * 16] * 3),
        (("sum_p", 0, 0), -0.5),
        (("sum_p", 0, 0), float("nan")),
        (("sum_p", 0, 0), float("inf")),
        (("sum_p", 0, 0), 0.1),
        (("sum_p", 0, 0), 1e300),
        (("sum_p", 0, 0), True),
        (("sum_p_top10", 0, 0), 4),
        (("reached", 0), 4),
        (("accepted", 0), 4),
        (("miss", 5), 1),
        (("stopped_hit", 0), 1),
        (("stopped_reached", 0), 1),
        (("beyond_accepted",), 1),
        (("beyond_reached",), 1),
        (("extra",), 1),
    ],
)
def test_a_bad_value_is_refused_by_name(path: tuple[Any, ...], value: object) -> None:
    # a wrong count may show up as the key it contradicts
    related = {"verifications": "verifications|drafted", "miss": "miss|rank"}
    with pytest.raises(InputError, match=related.get(path[0], path[0])):
        Snapshot.from_dict(broken(path, value))


def test_a_missing_key_is_refused_by_name() -> None:
    full = Snapshot().to_dict()
    for key in full:
        with pytest.raises(InputError, match=f"'{key}' is missing"):
            Snapshot.from_dict({k: v for k, v in full.items() if k != key})
    for other in (None, [], 3, "x"):
        with pytest.raises(InputError, match="object"):
            Snapshot.from_dict(other)


def test_hostile_values_do_not_make_hostile_messages() -> None:
    deep: Any = 0
    for _ in range(5000):
        deep = [deep]
    for value in ("x" * 10_000, 10**5000, -(10**5000), deep, {"a": deep}):
        for key in ("verifications", "drafted", "sum_p"):
            with pytest.raises(InputError, match=key) as e:
                Snapshot.from_dict(broken((key,), value))
            assert len(str(e.value)) < 100
            assert "\n" not in str(e.value)
        with pytest.raises(InputError, match="sum_p"):
            Snapshot.from_dict(broken(("sum_p", 3, 3), value))
    with pytest.raises(InputError, match="unknown key"):
        Snapshot.from_dict(broken(("x" * 10_000,), 1))
