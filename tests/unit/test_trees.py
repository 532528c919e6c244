"""Best trees: against every tree there is, and by hand."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import by_chance, prompt, trace

from mtpstats import trees
from mtpstats.errors import InputError
from mtpstats.policy import Tree
from mtpstats.replay import replay, totals
from mtpstats.trees import (
    best_trees,
    choose,
    estimated_length,
    improve,
    position_rates,
    tree_from_rates,
    unseen_lengths,
)

RANKS = 3


@cache
def every_tree(n, depth):
    """All prefix-closed sets of n rank paths over ranks 1 to 3, as frozensets."""
    if n == 0:
        return {frozenset()}
    grown = set()
    for tree in every_tree(n - 1, depth):
        for above in {(), *tree}:
            for rank in range(1, RANKS + 1):
                path = (*above, rank)
                if len(path) <= depth and path not in tree:
                    grown.add(tree | {path})
    return grown


def paths_of(recording):
    """The rank path of every root whose texts goes on long enough, up to its first miss."""
    found = []
    for one in recording.prompts:
        depth = one.rank.shape[1]
        for root, ranks in zip(one.roots, one.rank.tolist(), strict=True):
            if root + depth < len(one.tokens):
                path = tuple(ranks)
                found.append(path[: path.index(0)] if 0 in path else path)
    return [tuple(rank for rank in path if rank != 255) for path in found]


def accepted(tree, path):
    return next(n for n in range(len(path), -1, -1) if n == 0 or path[:n] in tree)


@st.composite
def recordings(draw):
    prompts = []
    for i in range(draw(st.integers(1, 3))):
        roots = draw(
            st.lists(
                st.lists(st.integers(0, RANKS), min_size=3, max_size=3), min_size=1, max_size=12
            )
        )
        ranks = []
        for r, path in enumerate(roots):
            known = path[: len(roots) - r]
            ranks.append(known[: known.index(0) + 1] if 0 in known else known)
        prompts.append(prompt(ranks, depth=3, id=f"p{i}"))
    return trace(*prompts)


@given(recordings())
@settings(max_examples=25, deadline=None)
def test_the_best_tree_accepts_what_the_best_of_all_trees_does(recording):
    paths = paths_of(recording)
    for n, best in enumerate(best_trees(recording, 5), 1):
        gains = [sum(accepted(tree, path) for path in paths) for tree in every_tree(n, depth=3)]
        mine = replay(recording, best, starts="uniform")
        assert mine.accepted == sum(accepted(set(best.paths), path) for path in paths) == max(gains)
        assert len(best) <= n


def test_ties_go_to_the_shallower_and_then_to_the_lower_rank():
    # (1,), (2,) and (3,) twice each, below each of the first two a child once or twice
    ranks = [[3, 0], [2, 1], [1, 2], [1, 2], [2, 3], [3, 0], [0], [0], [0]]
    best = best_trees(trace(prompt(ranks, depth=2)), 6)
    assert best[-1].paths == ((1,), (2,), (3,), (1, 2), (2, 1), (2, 3))
    assert [tree.paths for tree in best[:4]] == [
        ((1,),),
        ((1,), (2,)),
        ((1,), (2,), (3,)),
        ((1,), (2,), (3,), (1, 2)),
    ]


def test_a_tree_stays_smaller_where_nothing_else_occurred():
    best = best_trees(trace(prompt([[1, 0], [2, 0], [0], [0]], depth=2)), 5)
    assert [len(tree) for tree in best] == [1, 2, 2, 2, 2]
    assert best_trees(trace(prompt([[0], [0]], depth=2)), 1) == [Tree()]


def test_uniform_best_trees_need_not_every_root():
    recording = trace(by_chance(1, every=3, n_generated=90), every=3)
    assert len(best_trees(recording, 4)) == 4
    with pytest.raises(InputError, match="every 3th root only"):
        choose(recording, [4])


@given(st.integers(0, 10**6), st.integers(0, 12), st.sampled_from(["n_predict", "eog"]), st.data())
@settings(max_examples=60, deadline=None)
def test_the_search_replays_as_replay_does(seed, n_nodes, stop, data):
    recording = trace(*(by_chance(seed + i, stop=stop, depth=3, name=f"p{i}") for i in range(2)))
    n_predict = data.draw(st.sampled_from([None, 0, 5, 12, 30]))
    search = trees._Search(recording, 12, n_predict)
    weights = np.array([1, data.draw(st.integers(0, 2))])
    nodes = frozenset(search.order(search.paths.counts(weights), n_nodes))
    score, counts = search.walk(nodes, weights)
    found = totals(recording, search.tree(nodes), n_predict=n_predict)
    assert score == (found.tokens @ weights, found.verifications @ weights)
    # the counts are those of the prefixes at the starts
    prefixes: Counter[tuple[int, ...]] = Counter()
    listed = replay(recording, search.tree(nodes), n_predict=n_predict).prompts
    for one, run, weight in zip(recording.prompts, listed, weights.tolist(), strict=True):
        r = 0
        for _, taken in run.verifications.tolist():
            path = [rank for rank in one.rank[r].tolist() if 1 <= rank <= 8]
            for n in range(len(path) + 1):
                prefixes[tuple(path[:n])] += weight
            r += taken + 1
    assert {search.path(i): int(n) for i, n in enumerate(counts) if n} == {
        path: n for path, n in prefixes.items() if n
    }


@pytest.mark.parametrize(
    ("changes", "header"),
    [
        ({}, {}),
        ({"stop": "eog"}, {}),
        ({"stop": "context", "n_ctx": 12}, {}),
        ({"stop": "nan"}, {}),
        ({}, {"heads": "shared"}),
    ],
)
def test_the_search_replays_up_to_every_kind_of_end(changes, header):
    # A root whose path is known for one token only, anywhere and nowhere.
    for gap in range(15):
        ranks = [[1, 2, 1], [1, 1, 1], [2, 0]] * 4 + [[1, 1], [1]]
        if gap < 14:
            ranks[gap] = ranks[gap][:1]
        recording = trace(prompt(ranks, depth=3, **changes), **header)
        for n_predict in range(16):
            search = trees._Search(recording, 12, n_predict)
            for tree in (Tree.chain(2), Tree([(1,), (2,), (1, 2), (1, 1), (1, 1, 1)])):
                nodes = [i for i in range(1, search.paths.n) if search.path(i) in tree.paths]
                found = totals(recording, search.tree(nodes), n_predict=n_predict)
                score, _ = search.walk(frozenset(nodes), np.ones(1, np.int64))
                assert score == (found.tokens[0], found.verifications[0])


def test_rare_paths_do_not_change_the_best_trees(monkeypatch):
    recording = trace(*(by_chance(i, n_generated=400, depth=4, name=f"p{i}") for i in range(3)))
    before = best_trees(recording, 8)
    chosen = choose(recording, [8])[0]
    monkeypatch.setattr(trees, "COMMON", 64)
    search = trees._Search(recording, 8)
    assert 65 <= search.paths.n < 120
    assert best_trees(recording, 8) == before
    assert choose(recording, [8])[0].length == pytest.approx(chosen.length, rel=0.01)


def test_a_search_that_replays_beats_uniform_starts():
    gains = []
    for seed in range(6):
        recording = trace(by_chance(seed, n_generated=120, depth=3, lean=0.3))
        for n in (2, 4):
            uniform = totals(recording, best_trees(recording, n)[-1]).length
            found = totals(recording, improve(recording, n)).length
            assert found >= uniform
            gains.append(found > uniform)
    assert any(gains)


def test_improving_finds_the_best_tree_of_a_run():
    # Six roots at which (2,) is right, each followed by a miss; then (1,) is right at eight in a
    # row, of which a run that takes it can only start at every other.
    recording = trace(prompt([[2], [0]] * 6 + [[1]] * 8 + [[0], [0]], depth=1))
    (uniform,) = best_trees(recording, 1)
    assert uniform.paths == ((1,),)
    assert improve(recording, 1).paths == ((2,),)
    for path, passes in (((1,), 12 + 4 + 2), ((2,), 6 + 8 + 2)):
        found = totals(recording, Tree([path]))
        assert (found.tokens[0], found.verifications[0]) == (22, passes)


# ---- estimates


def test_the_estimate_is_the_sum_of_products():
    rates = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.1]]
    assert estimated_length(Tree([(1,), (1, 1)]), rates) == pytest.approx(1.9)
    assert estimated_length(Tree([(1,), (2,), (2, 2)]), rates) == pytest.approx(1.85)
    assert estimated_length(Tree(), rates) == 1


def test_a_tree_from_rates_takes_the_largest_products():
    rates = np.zeros((2, 8))
    rates[0, :3] = 0.6, 0.2, 0.1
    rates[1, :3] = 0.5, 0.25, 0.1
    # 0.6, 0.3, 0.2, 0.15, then 0.1 twice: the shallower first
    order = [(1,), (1, 1), (2,), (1, 2), (3,), (2, 1)]
    for n in range(7):
        assert tree_from_rates(rates, n).paths == Tree(order[:n]).paths
    assert len(tree_from_rates(rates, 100)) == 3 + 9


def test_position_rates_are_those_of_a_chain():
    # all before at rank 1: roots 0, 1, 2, 3 at position 0, roots 0 and 2 at position 1
    ranks = [[1, 2], [2, 1], [1, 1], [0], [1, 1], [1]]
    rates = position_rates(trace(prompt(ranks, depth=2)))
    assert rates[0, :2].tolist() == [3 / 5, 1 / 5]
    assert rates[1, :2].tolist() == [2 / 3, 1 / 3]
    assert rates.shape == (2, 8)


# ---- choices


def test_choices_score_on_both_halves():
    recording = trace(*(by_chance(i, n_generated=80, name=f"p{i}") for i in range(5)))
    halves = recording.select([0, 2, 4]), recording.select([1, 3])
    chosen = choose(recording, [6, 3])
    assert [one.budget for one in chosen] == [3, 6]
    for one in chosen:
        assert one.length == totals(recording, one.tree).length
        assert one.uniform == best_trees(recording, one.budget)[-1]
        assert one.uniform_replayed == totals(recording, one.uniform).length
        uniform = replay(recording, one.uniform, starts="uniform").totals
        assert one.uniform_length == pytest.approx(uniform.length)
        assert one.length >= one.uniform_replayed
        assert one.improved == (one.tree != one.uniform)
        assert one.from_rates_length == totals(recording, one.from_rates).length
        rates = position_rates(recording)
        assert one.from_rates == tree_from_rates(rates, one.budget)
        assert one.estimate == estimated_length(one.uniform, rates)
        assert one.half_length == totals(halves[0], one.half).length
        assert one.other_half_length == totals(halves[1], one.half).length
        assert one.half_length >= totals(halves[0], best_trees(halves[0], one.budget)[-1]).length
        json.dumps(one.to_dict(), allow_nan=False)
    assert len(chosen[0].shares) == len(chosen[0].tree)
    paths = paths_of(recording)
    for path, share in zip(chosen[0].tree.paths, chosen[0].shares, strict=True):
        hits = sum(other[: len(path)] == path for other in paths)
        assert share == pytest.approx(hits / len(paths))


def test_a_single_prompt_has_no_halves():
    (one,) = choose(trace(by_chance(1)), [2])
    assert (one.half, one.half_length, one.other_half_length) == (None, None, None)
    assert unseen_lengths(trace(by_chance(1)), [2, 3]) == [None, None]


def test_trees_of_an_empty_trace():
    empty = trace(by_chance(1)).select([])
    (one,) = choose(empty, [2])
    assert (one.tree, one.length, one.uniform_length) == (Tree(), None, None)


def test_unseen_lengths_are_means_over_prompts_left_out():
    # Two prompts of opposite habits: a tree chosen on one is worth nothing on the other.
    recording = trace(prompt([[1]] * 20, depth=1, id="a"), prompt([[2]] * 20, depth=1, id="b"))
    (found,) = unseen_lengths(recording, [1], resamples=50)
    assert (found.value, found.lo, found.hi) == (1.0, 1.0, 1.0)
    (whole,) = unseen_lengths(recording, [2], resamples=50)
    # drawn twice, a prompt does not suggest the other's node
    assert whole.value == 1.0
    same = trace(prompt([[1]] * 20, depth=1, id="a"), prompt([[1]] * 20, depth=1, id="b"))
    (found,) = unseen_lengths(same, [1], resamples=50)
    assert found.value == pytest.approx(2.0)
    assert unseen_lengths(recording, [1], seed=3) == unseen_lengths(recording, [1], seed=3)
    with pytest.raises(InputError, match="0 resamples"):
        unseen_lengths(recording, [1], resamples=0)


@pytest.mark.parametrize("n", [-1, 1024])
def test_budgets_no_tree_has(n):
    for call in (best_trees, improve, tree_from_rates):
        with pytest.raises(InputError, match=f"cannot have {n} nodes"):
            call(trace(by_chance(1)) if call is not tree_from_rates else [[0.5] * 8], n)
    with pytest.raises(InputError, match=f"cannot have {n} nodes"):
        choose(trace(by_chance(1)), [n])
