"""What a trace says of the head, and a policy's figures, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from made import by_chance, prompt, trace

from mtpstats.figures import figures
from mtpstats.intervals import Interval, wilson
from mtpstats.policy import Chain, Tree
from mtpstats.replay import replay
from mtpstats.uniform import continuations, head_summary, overlaps

RANKS = [[1, 2, 1], [2, 1, 1], [2, 2], [1, 1, 0], [2, 1, 2], [1, 1, 1], [2, 1], [1]]


def test_how_branches_go_on():
    found = {(one.position, one.rank): one for one in continuations(trace(prompt(RANKS, depth=3)))}
    # rank 2 at position 0: roots 1, 2, 4 and 6; the first choice right after it in three
    assert (found[0, 2].cases, found[0, 2].hits) == (4, 3)
    assert found[0, 2].rate == wilson(3, 4)
    # rank 1 at position 0: roots 0, 3, 5, and 7, after which nothing is known
    assert (found[0, 1].cases, found[0, 1].hits) == (3, 2)
    # rank 2 at position 1, rank 1 before it: root 0
    assert (found[1, 2].cases, found[1, 2].hits) == (1, 1)
    assert (found[1, 1].cases, found[1, 1].hits) == (2, 1)
    assert found[0, 3].cases == 0
    assert found[0, 3].rate is None
    assert len(found) == 2 * 8


def test_recall_is_about_roots_counted_once():
    summary = head_summary(trace(prompt(RANKS, depth=3)))
    # roots 0 to 5 have three known tokens after them
    assert [position.reached for position in summary.positions] == [6, 3, 2]
    assert summary.positions[0].rank_counts[:3] == (3, 3, 0)
    assert summary.positions[0].recall[0] == wilson(3, 6)
    assert summary.positions[0].recall[1] == wilson(6, 6)
    assert summary.positions[2].miss_count == 1


def test_overlap_is_a_mean_over_what_is_known():
    share = np.array([[0.5, np.nan], [0.25, 0.125], [np.nan, np.nan]])
    found = overlaps(trace(prompt([[1, 1], [1, 1], [1]], depth=2, overlap=share)))
    assert found[0].value == pytest.approx(0.375)
    assert found[1].value == pytest.approx(0.125)
    nothing = prompt([[1]], depth=1, overlap=[[np.nan]])
    assert overlaps(trace(nothing)) == [None]


def test_intervals_come_from_prompts_that_differ():
    one, other = prompt(RANKS, depth=3, id="a"), prompt([[2, 1, 1]] * 6 + [[0], [0]], depth=3)
    found = continuations(trace(one, other))
    rank2 = next(c for c in found if (c.position, c.rank) == (0, 2))
    assert (rank2.cases, rank2.hits) == (4 + 6, 3 + 6)
    assert rank2.rate.value == pytest.approx(0.9)
    assert (rank2.rate.lo, rank2.rate.hi) == (0.75, 1.0)  # all of one prompt, all of the other


def test_figures_of_a_policy():
    recording = trace(prompt([[1, 1], [1, 1], [2, 1], [1, 1], [1, 1], [1]], depth=2))
    found = figures(replay(recording, Chain(2)))
    # root 0: two; root 3: two; then the text ends
    assert (found.tokens, found.verifications, found.drafted, found.accepted) == (6, 2, 4, 4)
    assert (found.steps, found.step_rows) == (4, 4)
    assert found.length == Interval(3.0, 3.0, 3.0)
    assert found.acceptance.value == 1.0
    assert found.nodes.value == found.head_steps.value == 2.0
    assert found.coverage.value == pytest.approx(4 / 6)
    tree = figures(replay(recording, Tree([(1,), (2,), (1, 1), (2, 1)]), n_predict=3))
    assert (tree.drafted, tree.steps, tree.step_rows) == (8, 4, 6)
    assert tree.to_dict()["policy"] == "tree:[[0],[1],[0,0],[1,0]]"


def test_figures_of_one_text_have_a_normal_interval():
    ranks = [[1], [1], [0], [1], [1], [0], [0], [1]]
    found = figures(replay(trace(prompt(ranks, depth=1)), Chain(1)))
    # roots 0, 2, 3, 5, 6; then 7, whose own token is missing: 1, 0, 1, 0, 0 accepted
    assert found.length.value == pytest.approx(7 / 5)
    half = 1.959964 * np.sqrt((0.4 - 0.16) / 5)
    assert found.length.hi == pytest.approx(1.4 + half, abs=1e-4)
    assert found.length.lo == pytest.approx(max(1, 1.4 - half), abs=1e-4)


def test_figures_of_nothing():
    found = figures(replay(trace(by_chance(1)).select([]), Chain(2)))
    assert (found.length, found.acceptance, found.coverage) == (None, None, None)
    plain = figures(replay(trace(by_chance(1)), Tree()))
    assert plain.acceptance is None
    assert plain.length.value == 1.0
