"""Trees grown while they are drafted: by hand, against plain Python, from a policy of one's own."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_replay
from handmade import costs
from hypothesis import given, settings
from hypothesis import strategies as st
from made import P, by_chance, prompt, trace
from test_replay import check, simulated

from mtpstats import plan as plans
from mtpstats._beams import Beams
from mtpstats.cost import Curve, Point
from mtpstats.errors import InputError
from mtpstats.policy import Eagle2, OptTree, Policy, Tree, parse_policy
from mtpstats.price import Pricer, flags_of, kind_of, label
from mtpstats.replay import replay, totals
from mtpstats.report import plan as plan_text
from mtpstats.report import planned
from mtpstats.trace import Trace, TracedPrompt, trace_header
from mtpstats.tracefile import TraceWriter

# ---- beams


def rows(*given: tuple[float, ...]) -> np.ndarray:
    """Candidates of nodes, NaN where there are none."""
    return np.float32([[*p, *[np.nan] * (8 - len(p))] for p in given])


def test_a_narrow_beam_is_kept_though_a_wider_one_leaves_it() -> None:
    beams = Beams(2)
    assert beams.grow(rows((0.5, 0.4))) == [(0, 1), (0, 2)]
    # The second's children, 0.2 each, push out the first's, 0.05: a beam of 1 goes on with (1, 1).
    assert beams.grow(rows((0.1, 0.1), (0.5, 0.5))) == [(0, 1), (1, 1), (1, 2)]
    # Below (1, 1) only the beam of 1 goes on, however probable; the beam of 2 takes the others.
    assert beams.grow(rows((1.0, 0.9), (0.5,), (0.5, 0.1))) == [(0, 1), (1, 1), (2, 1)]


def test_equals_go_by_rank_path_and_missing_candidates_end_a_beam() -> None:
    beams = Beams(3)
    assert beams.grow(rows((0.25,) * 4)) == [(0, 1), (0, 2), (0, 3)]
    assert beams.grow(rows((), (0.5, 0.5), (0.5,))) == [(1, 1), (1, 2), (2, 1)]
    assert beams.grow(rows((), (), ())) == []
    assert beams.grow(np.empty((0, 8), np.float32)) == []
    with pytest.raises(ValueError, match="1 rows for 0 nodes"):
        beams.grow(rows((0.5,)))


# ---- by hand


def hand(ranks: list[list[int]], **changes: Any) -> TracedPrompt:
    """Every root offers the same: 0.5, 0.25 at the root, 0.25, 0.125 below 1, 0.75 below 2.

    Values: (1) 0.5, (2) 0.25, (2, 1) 0.1875, (1, 1) 0.125, (1, 2) 0.0625.
    """
    said = {(): (0.5, 0.25), (1,): (0.25, 0.125), (2,): (0.75,)}
    node = [(0, 0, 0), (1, 0, 1), (1, 0, 2)]
    return prompt(
        ranks, 2, width=2, beam_node=np.tile(np.uint8(node), (len(ranks), 1)),
        beam_p=np.tile(rows(*said.values()), (len(ranks), 1)), **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "verifications", "widths"),
    [
        # (1), (2), (2, 1) at root 0; the target goes 2, 1. Root 3: 1, then a miss.
        (OptTree(3, 2, 2), [(3, 2), (3, 1)], {1: 2, 2: 2}),
        # Both steps of one row: (1), (2), (1, 1); no node below (2).
        (OptTree(3, 2, 1), [(3, 1), (3, 0), (3, 1)], {1: 6}),
        # The first step adds 0.75 and the second 0.1875 to what is expected.
        (OptTree(3, 2, 2, 0.1875), [(3, 2), (3, 1)], {1: 2, 2: 2}),
        (OptTree(3, 2, 2, 0.75), [(2, 1), (2, 0), (2, 1)], {1: 3}),
        (OptTree(1, 2, 2), [(1, 0), (1, 0), (1, 0), (1, 1)], {1: 8}),
        (OptTree(9, 2, 2), [(5, 2), (5, 1)], {1: 2, 2: 2}),
        (Eagle2(4, 2, 2), [(4, 2), (4, 1)], {1: 2, 2: 2}),
        (Eagle2(1, 2, 2), [(1, 0), (1, 0), (1, 0), (1, 1)], {1: 4, 2: 4}),
        # One candidate of each node only: (1), (1, 1).
        (Eagle2(9, 2, 1), [(2, 0), (2, 0), (2, 0), (2, 1)], {1: 8}),
    ],
)
def test_by_hand(policy: Any, verifications: list[Any], widths: dict[int, int]) -> None:
    recorded = trace(hand([[2, 1], [3, 1], [0], [1, 0], [1]]), width=2)
    found = replay(recorded, policy)
    assert found.prompts[0].verifications.tolist() == [list(pair) for pair in verifications]
    assert found.prompts[0].stop == "trace"
    steps = found.totals.widths.sum(axis=0)
    assert {int(n): int(steps[n]) for n in np.flatnonzero(steps)} == widths


def test_counters_follow_the_path_that_was_accepted() -> None:
    found = replay(trace(hand([[2, 1], [3, 1], [0], [1, 0], [1]]), width=2), OptTree(3, 2, 2))
    counted = found.snapshot
    assert counted.drafted[:3].tolist() == [2, 2, 0]
    assert counted.reached[:3].tolist() == [2, 1, 0]  # (1) is a leaf
    assert counted.accepted[:3].tolist() == [2, 1, 0]
    assert counted.rank[0, :2].tolist() == [1, 1]
    assert counted.rank[1, 0] == 1
    assert counted.to_dict()["censored"][0][1:3] == [1, 1]  # of 1 and of 2 tokens
    assert counted.sum_p[0, 0] == 2 * P[0]  # of the forced path, as everywhere


def test_limits_are_known_before_the_tree_is_grown() -> None:
    recorded = trace(hand([[2, 1], [3, 1], [0], [1, 0], [1]]), width=2, n_predict=4)
    # One token is left to draft: (1), (2) rather than a tree that is cut.
    found = replay(recorded, OptTree(3, 2, 2), n_predict=2)
    assert found.prompts[0].verifications.tolist() == [[2, 1], [3, 0]]
    assert found.totals.widths.tolist() == [[0, 2, 1]]


@pytest.mark.parametrize(
    ("rank", "values", "tie"),
    [
        (2, (0.5, 0.25, 0.2, 0.1), None),
        (2, (0.5, 0.25, 0.248, 0.1), 0),  # the third almost took the place of the target's choice
        (3, (0.5, 0.25, 0.248, 0.1), 0),  # the target's choice almost had a place
        (3, (0.5, 0.25, 0.2, 0.199), None),
        (1, (0.5, 0.25, 0.248, 0.1), None),
        (0, (0.5, 0.25, 0.248, 0.1), None),
    ],
)
def test_near_ties_at_the_edge_of_a_tree(rank: int, values: Any, tie: int | None) -> None:
    one = prompt(
        [[rank], [0], [0]], 1, width=1, beam_node=[[0, 0, 0]] * 3,
        beam_p=np.tile(rows(values), (3, 1)),
    )  # fmt: skip
    assert replay(trace(one, width=1), OptTree(2, 1, 1)).prompts[0].near_tie == tie


def offering(paths: dict[Any, Any], ranks: list[list[int]], width: int) -> Trace:
    """A text whose roots all offer ``paths``."""
    depth = max(map(len, paths)) + 1
    layers = [sorted(path for path in paths if len(path) == d) for d in range(depth)]
    nodes = [
        (d, layers[d - 1].index(path[:-1]) if d else 0, path[-1] if d else 0)
        for d, layer in enumerate(layers)
        for path in layer
    ]
    one = prompt(
        ranks, depth, width=width,
        beam_node=np.tile(np.uint8(nodes), (len(ranks), 1)),
        beam_p=np.tile(rows(*(paths[path] for layer in layers for path in layer)), (len(ranks), 1)),
    )  # fmt: skip
    return trace(one, width=width)


@pytest.mark.parametrize(
    ("paths", "path", "policy", "pair", "widths"),
    [
        # Equals at the edge of a step's rows: (1), not (2).
        ({(): (0.25, 0.25), (1,): (0.5,)}, [1, 1], OptTree(9, 2, 1), [3, 2], [0, 2]),
        # (2, 1), 0.3, takes the row of (1, 2), not of (1, 1), both 0.2.
        (
            {(): (0.5, 0.4), (1,): (0.4, 0.4), (2,): (0.75,), (1, 1): (0.9,), (2, 1): (0.1,)},
            [1, 1, 1], OptTree(9, 3, 2), [7, 3], [0, 1, 2],
        ),
        # (2, 1), 0.32, puts (1, 1), 0.3, out of the tree, which is then not expanded.
        (
            {(): (0.5, 0.4), (1,): (0.6,), (2,): (0.8,), (1, 1): (0.9,), (2, 1): (0.01,)},
            [2, 1, 0], OptTree(3, 3, 2), [3, 2], [0, 2, 1],
        ),
    ],
)  # fmt: skip
def test_which_nodes_are_expanded(
    paths: Any, path: list[int], policy: Any, pair: list[int], widths: list[int]
) -> None:
    found = replay(offering(paths, [path, [0], [0], [0]], policy.width), policy, n_predict=0)
    assert found.prompts[0].verifications.tolist() == [pair]
    assert found.totals.widths.tolist() == [widths]


def close(paths: dict[Any, Any], ranks: list[list[int]], policy: Any, **options: Any) -> int | None:
    """The first near tie of a text whose roots all offer ``paths``."""
    recording = offering(paths, ranks, policy.width)
    return replay(recording, policy, **options).prompts[0].near_tie


def test_near_ties_with_what_was_pushed_out_of_a_tree() -> None:
    # (1, 1), 0.252, took the place of (2), 0.25, which was right.
    assert close({(): (0.5, 0.25), (1,): (0.504,)}, [[2], [0], [0]], OptTree(2, 2, 1)) == 0
    assert close({(): (0.5, 0.25), (1,): (0.52,)}, [[2], [0], [0]], OptTree(2, 2, 1)) is None
    # One candidate a node, and all are in the tree: the second is no closer for being likelier
    # than the last.
    one = {(): (0.5, 0.27), (1,): (0.5,)}
    assert close(one, [[2], [0], [0]], Eagle2(9, 2, 1)) is None


def test_near_ties_of_what_is_expanded() -> None:
    # In one row only (1) goes on, 0.5, not (2). After it comes a miss.
    for second, tie in ((0.499, 0), (0.49, None)):
        assert close({(): (0.5, second), (1,): (0.3,)}, [[1, 0], [0]], OptTree(9, 2, 1)) == tie
    # Of two rows, (1, 1), 0.3, and (2, 1), 0.204, the latter took the place of (1, 2), 0.201: their
    # quotient is 1.015, and two steps of 1.01 each led to them.
    two = {(): (0.5, 0.4), (1,): (0.6, 0.402), (2,): (0.51,), (1, 1): (0.3,), (2, 1): (0.3,)}
    for path, tie in (([2, 1, 0], 0), ([1, 2, 0], 0), ([1, 1, 0], None)):
        assert close(two, [path, [0], [0], [0]], OptTree(9, 3, 2)) == tie
    # Root 2 has a single step, after which nothing is expanded.
    roots = [[1, 0], [0], [1, 0], [0], [0], [0]]
    steps = {(): (0.5, 0.25), (1,): (0.3,)}
    assert close(steps, roots, OptTree(9, 2, 1), n_predict=4) is None


def test_near_ties_of_where_a_tree_stops_growing() -> None:
    for first, tie in ((0.3004, 0), (0.301, None)):
        offered = {(): (first,), (1,): (0.5,)}
        assert close(offered, [[0], [0]], OptTree(9, 2, 1, 0.3)) == tie
    # Without a delta any gain will do.
    offered = {(): (0.5,), (1,): (0.0005,), (1, 1): (0.5,)}
    assert close(offered, [[0], [0]], OptTree(9, 3, 1)) is None
    # (1) has no candidates, and almost (2) had gone on.
    assert close({(): (0.5, 0.498), (1,): ()}, [[1], [0]], OptTree(1, 2, 1)) == 0


def test_what_stands_before_a_text_s_beams_is_not_read() -> None:
    one = hand([[2, 1], [3, 1], [0], [1, 0], [1]])
    node = np.concatenate([np.zeros((1, 3), np.uint8), one.beam_node])
    found = replay(trace(replace(one, beam_node=node[1:]), width=2), OptTree(3, 2, 2))
    assert found.prompts[0].verifications.tolist() == [[3, 2], [3, 1]]


# ---- against plain Python


@st.composite
def recorded(draw: Any) -> tuple[Trace, dict[str, Any]]:
    """A trace with beams, and options of replay()."""
    n_generated = draw(st.integers(1, 12))
    every = draw(st.sampled_from([1, 1, 1, 2]))
    width = draw(st.integers(1, 5))
    seed = draw(st.integers(0, 10**6))
    prompts = [
        by_chance(
            seed + i,
            n_generated=n_generated,
            stop=draw(st.sampled_from(["n_predict", "eog"])),
            every=every,
            lean=draw(st.sampled_from([0.3, 0.8])),
            width=width,
            few=draw(st.sampled_from([0.0, 0.2])),
        )
        for i in range(2)
    ]
    options: dict[str, Any] = {}
    if every > 1 or draw(st.booleans()):
        options["starts"] = "uniform"
    if draw(st.booleans()):
        options["n_predict"] = draw(st.integers(0, n_generated))
    if draw(st.booleans()):
        options["n_ctx"] = draw(st.integers(1, n_generated + 4))
    return trace(*prompts, every=every, width=width), options


@given(recorded(), st.data())
@settings(max_examples=60, deadline=None)
def test_grown_trees_against_plain_python(case: Any, data: Any) -> None:
    recording, options = case
    n_nodes, depth = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 4))
    width = data.draw(st.integers(1, recording.width))
    delta = data.draw(st.sampled_from([None, 0.0, 0.05, 0.3]))
    policy = Eagle2(n_nodes, depth, width)
    if delta is not None:
        policy = OptTree(n_nodes, depth, width, delta)  # type: ignore[assignment]
    expected = simulated(recording, options, reference_replay.grown(n_nodes, depth, width, delta))
    full = replay(recording, policy, **options)
    check(full, expected)
    light = totals(recording, policy, **options)
    for name in ("tokens", "verifications", "drafted", "accepted", "rows", "widths", "lengths"):
        assert getattr(full.totals, name).tolist() == getattr(light, name).tolist()


class Mine(Policy):
    """OPT-Tree written by a user, of what a root says."""

    def __init__(self, n_nodes: int, depth: int, width: int) -> None:
        self.of = n_nodes, depth, width

    def draft(self, root: Any) -> Any:
        n_nodes, depth, width = self.of
        assert root.width >= width
        offered: dict[tuple[int, ...], float] = {}
        layer, steps = {(): 1.0}, 0
        while layer and steps < min(depth, root.limit):
            for path, value in layer.items():
                for rank, p in enumerate(root.below(path).tolist()):
                    if p == p:
                        offered[(*path, rank + 1)] = value * p
            steps += 1
            ordered = sorted(offered, key=lambda path: (-offered[path], len(path), path))[:n_nodes]
            layer = {path: offered[path] for path in ordered if len(path) == steps}
            layer = dict(list(layer.items())[:width])
        return Tree(ordered if offered else ()), steps


@given(recorded(), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_a_policy_in_python_reads_the_beams(case: Any, n_nodes: int, depth: int) -> None:
    recording, options = case
    if any(np.isnan(one.beam_p).any() for one in recording.prompts):
        return  # a step without a candidate drops the draft: a policy here cannot say so
    width = recording.width
    mine = replay(recording, Mine(n_nodes, depth, width), **options)
    compiled = replay(recording, OptTree(n_nodes, depth, width), **options)
    for one, other in zip(mine.prompts, compiled.prompts, strict=True):
        assert one.verifications.tolist() == other.verifications.tolist()
        assert (one.tokens, one.stop) == (other.tokens, other.stop)
    assert mine.snapshot.rank.tolist() == compiled.snapshot.rank.tolist()


def test_what_a_root_says_below_a_path() -> None:
    heard: list[Any] = []

    class Ask(Policy):
        def draft(self, root: Any) -> int:
            paths = ((), (1,), (2,), (3,), (1, 1), (9,))
            heard.append([root.width, *(root.below(path) for path in paths)])
            return 1

    replay(trace(hand([[2, 1], [3, 1], [0]]), width=2), Ask())
    width, root, first, second, *others = heard[-1]
    assert width == 2
    assert [root[:2].tolist(), first[:2].tolist(), second[0]] == [[0.5, 0.25], [0.25, 0.125], 0.75]
    assert np.isnan(second[1:]).all()
    assert others == [None] * 3
    # (2, 1) stands after (1, 1), of the same rank
    deep = {(): (0.5, 0.4), (1,): (0.6,), (2,): (0.8,), (1, 1): (0.9,), (2, 1): (0.01,)}
    asked: list[float] = []

    class Deeper(Policy):
        def draft(self, root: Any) -> int:
            asked.extend(float(root.below(path)[0]) for path in ((1, 1), (2, 1)))
            return 0

    replay(offering(deep, [[0], [0]], 2), Deeper(), n_predict=0)
    assert asked == pytest.approx([0.9, 0.01])
    replay(trace(prompt([[1]], 2)), Ask())
    assert heard[-1] == [0, *[None] * 6]


def test_a_trace_that_is_not_wide_enough() -> None:
    narrow = trace(hand([[1, 1], [1]]), width=2)
    with pytest.raises(InputError, match=r"expands 3 nodes a step, the trace holds beams of 2: "
                       r"record with --width 3"):  # fmt: skip
        replay(narrow, Eagle2(4, 2, 3))
    with pytest.raises(InputError, match="holds beams of 0: record with --width 1"):
        replay(trace(prompt([[1]], 2)), OptTree(4, 2, 1))
    with pytest.raises(InputError, match="drafts 3 deep, the trace holds 2: record with --depth"):
        replay(narrow, OptTree(4, 3, 2))


# ---- the file

HEADER = trace_header(depth=4, width=3, n_predict=20)


def written(path: Path, *prompts: TracedPrompt) -> Path:
    with TraceWriter(path, HEADER) as writer:
        for one in prompts:
            writer.append(one)
    return path


def test_beams_come_back_from_a_file(tmp_path: Path) -> None:
    prompts = [by_chance(seed, width=3, few=0.2, name=f"p{seed}") for seed in (1, 2)]
    loaded = Trace.load(written(tmp_path / "a.trace", *prompts))
    assert (loaded.width, loaded.header["width"]) == (3, 3)
    for mine, original in zip(loaded.prompts, prompts, strict=True):
        np.testing.assert_array_equal(mine.beam_node, original.beam_node)
        np.testing.assert_array_equal(mine.beam_p, original.beam_p)
    chosen = loaded.select(["p2"])
    assert (chosen.width, chosen.prompts[0]) == (3, loaded.prompts[1])
    with TraceWriter(tmp_path / "a.trace", HEADER, resume=True) as writer:
        writer.append(by_chance(3, width=3, name="p3"))
    assert len(Trace.load(tmp_path / "a.trace").prompts) == 3


def test_without_a_width_a_file_says_nothing_of_it(tmp_path: Path) -> None:
    header = trace_header(depth=4)
    assert "width" not in header
    assert not [name for name in header["arrays"] if "beam" in name]
    with TraceWriter(tmp_path / "a.trace", header) as writer:
        writer.append(by_chance(1))
        with pytest.raises(InputError, match="width is 3, the header says 0"):
            writer.append(by_chance(2, width=3))
    assert Trace.load(tmp_path / "a.trace").width == 0


def test_another_width_cannot_be_resumed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.trace", by_chance(1, width=3))
    for other, words in (({"width": 2}, "width 3, not 2"), ({}, "width 3, not None")):
        with pytest.raises(InputError, match=f"was recorded with {words}"):
            TraceWriter(path, trace_header(depth=4, n_predict=20, **other), resume=True)


@pytest.mark.parametrize("width", [-1, 17, 2.5, "3", True, None, [1]])
def test_a_header_with_a_width_that_cannot_be(width: Any) -> None:
    with pytest.raises(InputError, match=r"width is .*, which no trace has"):
        Trace({**HEADER, "width": width}, [])


GOOD = by_chance(4, n_generated=6, width=3)


def damaged() -> dict[str, tuple[Any, Any]]:
    """(nodes, probabilities) that no recording has."""
    node, p = GOOD.beam_node, GOOD.beam_p

    def changed(array: np.ndarray, place: Any, value: Any) -> np.ndarray:
        array = array.copy()
        array[place] = value
        return array

    return {
        "a parent out of range": (changed(node, (5, 1), 200), p),
        "another parent": (changed(node, (5, 1), node[5, 1] ^ 1), p),
        "another rank": (changed(node, (2, 2), 7), p),
        "rank 255": (changed(node, (2, 2), 255), p),
        "another depth": (changed(node, (3, 0), 3), p),
        "a root twice": (np.concatenate([node[:1], node]), np.concatenate([p[:1], p])),
        "too few": (node[:-1], p[:-1]),
        "too many": (np.concatenate([node, node[-1:]]), np.concatenate([p, p[-1:]])),
        "none": (node[:0], p[:0]),
        "a probability of 2": (node, changed(p, (4, 0), 2)),
        "a negative one": (node, changed(p, (-1, 7), -1)),
        "infinity": (node, changed(p, (-1, 0), np.inf)),
        "NaN before a number": (node, changed(p, (0, 1), np.nan)),
        "the best last": (node, changed(p, (-1, 7), 1)),
        "two the wrong way round": (node, changed(p, (-1, 7), (p[-1, 0] + p[-1, 6]) / 2)),
        "probabilities of another root": (node, p[::-1]),
    }


@pytest.mark.parametrize("name", damaged())
def test_beams_that_no_recording_has(name: str) -> None:
    node, p = damaged()[name]
    with pytest.raises(InputError, match=r"^prompt chance: row \d+ of \d+ of beam_node and beam_p"):
        replace(GOOD, beam_node=node, beam_p=p)


def test_beams_of_the_wrong_shape() -> None:
    for name, array in (
        ("beam_node", GOOD.beam_node[:, :2]),
        ("beam_p", GOOD.beam_p[:-1]),
        ("beam_p", GOOD.beam_p[:, :7]),
    ):
        with pytest.raises(InputError, match=f"{name} has shape"):
            replace(GOOD, **{name: array})
    with pytest.raises(InputError, match="width is 17"):
        replace(GOOD, width=17)
    with pytest.raises(InputError, match="what a recording of width 2 holds"):
        replace(GOOD, width=2)
    with pytest.raises(InputError, match="what a recording of width 0 holds"):
        replace(GOOD, width=0)
    with pytest.raises(InputError, match="width is 3, the header says 0"):
        Trace(trace_header(depth=4), [GOOD])


def test_the_documented_reader_finds_the_paths(tmp_path: Path) -> None:
    """As docs/files.md tells it: from the nodes to rank paths."""
    original = by_chance(4, width=3)
    path = written(tmp_path / "a.trace", original)
    with open(path, "rb") as file:
        header = json.loads(file.readline())
        file.readline()
        arrays = {name: np.load(file) for name in header["arrays"]}
    text = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    start = text.index("roots = []  # of each root")
    code = text[start : text.index("```", start)]
    found: dict[str, Any] = dict(arrays)
    exec(code, found)
    expected = reference_replay.beams(original)
    assert [sorted(one) for one in found["roots"]] == [sorted(one) for one in expected]
    for mine, theirs in zip(found["roots"], expected, strict=True):
        for path_, p in theirs.items():
            assert [q for q in mine[path_].tolist() if q == q] == p
    assert Counter(len(path) for one in expected for path in one)[0] == len(original.roots)


# ---- the plan


def test_a_price_counts_rows_and_the_widths_of_steps() -> None:
    recorded_ = trace(hand([[2, 1], [3, 1], [0], [1, 0], [1]]), width=2)
    of = replace(
        costs({1: 10, 4: 16}, draft=2, follow={1: 1, 4: 2}, other_token=0.25),
        draft=Curve({1: Point.of([2]), 2: Point.of([5])}),
    )
    policy = OptTree(3, 2, 2)  # two verifications of 3 nodes, each with steps of 1 and 2 rows
    (priced,) = Pricer(of, 1).price([(policy, totals(recorded_, policy))])
    assert {part: seconds[0] for part, seconds in priced.parts.items()} == {
        "verify": 32, "follow": 4, "draft": 14, "other": 5 * 0.25,
    }  # fmt: skip
    assert (priced.kind, priced.nodes, priced.steps) == ("opttree", 3, 2)
    assert not priced.extrapolated
    (priced,) = Pricer(costs({1: 10, 2: 16}, draft=2), 1).price(
        [(policy, totals(recorded_, policy))]
    )
    assert priced.extrapolated


def test_a_plan_ranks_them_with_the_others(tmp_path: Path) -> None:
    # The second choice is right, then its first, and the head is sure of neither root nor node:
    # no chain accepts anything, a grown tree of (1), (2), (2, 1) all.
    texts = [hand([[2, 1]] * 29 + [[2]], stop="eog", id=name) for name in "ab"]
    wide = trace(*texts, width=2)
    made_ = plans.make(wide, costs({1: 10, 33: 11}, draft=0.1))
    by_policy = {priced.policy: priced for priced in made_.policies}
    assert {kind_of(policy) for policy in by_policy} >= {"chain", "tree", "opttree", "eagle2"}
    best = made_.best("opttree")
    assert best is not None
    assert best.length == 3
    assert best.in_sample is None  # few settings, scored as chains are
    assert made_.wide in (best, made_.best("eagle2"), made_.best("tree"))
    assert OptTree(4, 2, 2, 0.1) in by_policy
    assert not [p for p in by_policy if getattr(p, "width", 0) > 2]
    shown = plan_text.render(made_)
    assert "width 2" in shown
    assert re.search(r"^opttree \d+, 2 wide \* ", shown, re.MULTILINE)
    assert re.search(r"^eagle2 \d+, 2 wide, 2 deep \* ", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= 80
    record = plans.to_dict(made_)
    assert record["trace"]["width"] == 2
    entries = [one for one in record["policies"] if one["kind"] == "opttree"]
    assert {"n_nodes": 4, "policy": "opttree:n_nodes=4,depth=2,width=2,delta=0.1"}.items() <= (
        next(one for one in entries if one["policy"].endswith("=4,depth=2,width=2,delta=0.1"))
    ).items()
    assert parse_policy(entries[0]["policy"]) in by_policy
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(record))
    families = {one.name: one.points for one in planned.chart(path).series}
    assert len(families["opttree, predicted"]) > 2
    for point in families["opttree, predicted"]:
        of_size = [one for one in entries if one["n_nodes"] == point.x]
        assert point.y == max(one["tokens_per_second"]["value"] for one in of_size)
    assert "eagle2, predicted" in families


def test_a_plan_without_a_width_has_none() -> None:
    made_ = plans.make(trace(by_chance(1)), costs({1: 10, 2: 11}, draft=1))
    assert made_.best("opttree") is None
    assert made_.best("eagle2") is None


@pytest.mark.parametrize(
    ("policy", "kind", "words"),
    [
        (OptTree(16, 8, 4, 0.1), "opttree", "opttree 16, 4 wide"),
        (Eagle2(60, 6, 10), "eagle2", "eagle2 60, 10 wide, 6 deep"),
    ],
)
def test_names(policy: Any, kind: str, words: str) -> None:
    assert (kind_of(policy), label(policy)) == (kind, words)
    with pytest.raises(InputError, match="runs chains only"):
        flags_of(policy)
