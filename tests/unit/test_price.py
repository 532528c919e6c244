"""What policies come to with costs, worked out on paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from handmade import COSTS, MISSES, MIXED, TWO, costs, text, trace

from mtpstats.breakeven import break_even, row_cost
from mtpstats.cost import Costs, Curve, Point
from mtpstats.errors import InputError
from mtpstats.policy import AdaptiveDepth, Chain, GatedSiblings, Policy, Tree
from mtpstats.price import NO_DRAFTING, Figure, Priced, Pricer, flags_of, kind_of, label, sent_rows
from mtpstats.replay import totals
from mtpstats.trace import Trace

ONE = trace(text(MIXED))


def price(recorded: Trace, policy: object, of: Costs = COSTS) -> Priced:
    (priced,) = Pricer(of, len(recorded.prompts)).price([(policy, totals(recorded, policy))])
    return priced


# MIXED has 6 tokens. No drafting: 6 passes of 1 row. n_max 1: roots 0, 2, 4, 5, of which root 4
# rejects. n_max 2: roots 0 and 3, all accepted. Tree of first and second choice: roots 0, 2, 4.
@pytest.mark.parametrize(
    ("policy", "passes", "seconds"),
    [
        (NO_DRAFTING, 6, 6 * (10 + 0.5) + 6 * 0.25),
        (Chain(1), 4, 4 * (11 + 1.5 + 2 + 0.5) + 6 * 0.25),
        (Chain(2), 2, 2 * (13 + 2 + 2 * 2 + 0.5) + 6 * 0.25),
        # The head follows the accepted path only: 2 rows each time.
        (Tree([(1,), (2,)]), 3, 3 * (13 + 1.5 + 2 + 0.5) + 6 * 0.25),
    ],
)
def test_a_price_is_the_sum_of_its_parts(policy: object, passes: int, seconds: float) -> None:
    priced = price(ONE, policy)
    assert priced.verifications[0] == passes
    assert priced.seconds[0] == pytest.approx(seconds)
    assert priced.rate == (pytest.approx(6 / seconds), None, None)  # one prompt: no interval
    assert priced.length == 6 / passes
    assert priced.period == pytest.approx(seconds / passes)


def test_parts_nodes_and_steps() -> None:
    priced = price(ONE, Chain(2))
    assert {part: seconds[0] for part, seconds in priced.parts.items()} == {
        "verify": 26, "follow": 4, "draft": 8, "other": 2.5,
    }  # fmt: skip
    assert (priced.nodes, priced.steps, priced.bare[0]) == (2, 2, 20)
    tree = price(ONE, Tree([(1,), (2,)]))
    assert (tree.nodes, tree.steps) == (2, 1)


def test_many_are_priced_as_each_alone() -> None:
    policies = [Chain(1 + i % 2, 0.1 * (i % 7)) for i in range(150)]
    many = Pricer(COSTS, 2).price((policy, totals(TWO, policy)) for policy in policies)
    assert [one.policy for one in many] == policies
    for one, policy in zip(many, policies, strict=True):
        alone = price(TWO, policy)
        assert one.rate == pytest.approx(alone.rate)
        assert one.parts["draft"] == pytest.approx(alone.parts["draft"])


def test_what_lies_beyond_the_measured_rows_is_said() -> None:
    assert not price(ONE, Tree([(1,), (2,)])).extrapolated
    wide = price(ONE, Tree([(1,), (2,), (3,)]))  # 4 rows: 13 + (13 - 10) / 2
    assert wide.extrapolated
    assert wide.parts["verify"][0] == 3 * 14.5
    assert wide.parts["follow"][0] == 3 * 1.5


def test_the_interval_over_two_prompts_reaches_from_the_one_to_the_other() -> None:
    # With two prompts a quarter of the resamples are all the first, a quarter all the second.
    none, chain = price(TWO, NO_DRAFTING), price(TWO, Chain(1))
    first, second = 4 * 15 + 1.5, 4 * 15 + 1.0
    assert chain.rate == pytest.approx((10 / (first + second), 4 / second, 6 / first))
    plain = 10.5 + 0.25  # seconds a token, in any resample
    assert none.rate == pytest.approx((1 / plain,) * 3)
    # Paired, the ratio is that of each resample.
    assert chain.over(none) == pytest.approx(
        (10 / (first + second) * plain, 4 / second * plain, 6 / first * plain)
    )


def test_the_spread_of_the_costs_is_in_the_interval() -> None:
    # Quartiles 9 and 11 of 100 samples: a median known to 1.2533 * 2 / 1.349 / 10 = 0.186.
    samples = np.quantile([8, 9, 10, 11, 12], np.linspace(0, 1, 100)).tolist()
    spread = costs({1: samples}, draft=1)
    none = price(trace(text(MISSES), text(MISSES, "b")), NO_DRAFTING, spread)
    assert none.rate.value == pytest.approx(1 / 10)
    assert none.rate.lo == pytest.approx(1 / (10 + 1.96 * 0.186), rel=0.004)
    assert none.rate.hi == pytest.approx(1 / (10 - 1.96 * 0.186), rel=0.004)


def test_between_measured_rows_a_straight_line_in_every_resample() -> None:
    # 2 rows, between 1 and 3, take the mean of both; 5, beyond, go on as from 1 to 3.
    by_three = costs({1: 10, 3: 12}, draft=1)
    assert price(ONE, Chain(1), by_three).parts["verify"].tolist() == [4 * 11] * 1001
    wide = price(ONE, Tree([(r,) for r in range(1, 5)]), by_three)
    assert wide.parts["verify"].tolist() == [3 * 14] * 1001
    assert float(by_three.verify(5)) == 14


def test_without_drafting_a_pass_costs_what_it_does_without_a_head() -> None:
    alone = costs({1: 10}, draft=1, plain=Curve({1: Point.of([6])}), other_plain=0.25)
    assert price(ONE, NO_DRAFTING, alone).seconds[0] == 6 * 6.25
    assert price(ONE, Chain(1), alone).parts["verify"][0] == 4 * 10


def test_means_where_they_explain_real_runs_better() -> None:
    skewed = [9, 10, 16]  # median 10, mean 35 / 3
    for measured, times in ((10.1, 10.1 / 10), (11.6, 11.6 / 12)):
        check = {"1": {"measured": measured, "by_medians": 10.0, "by_means": 12.0}}
        of = costs({1: skewed}, draft=1, facts={"check": check})
        a_pass = 10 if measured == 10.1 else 35 / 3
        # Scaled so that they make of the real runs what those took.
        assert price(ONE, Chain(1), of).parts["verify"][0] == pytest.approx(4 * a_pass * times)


def test_rows_that_seem_to_take_less_time_are_noise() -> None:
    priced = price(ONE, Chain(1), costs({1: 10, 2: 8}, draft=1))
    assert priced.parts["verify"][0] == priced.bare[0] == 4 * 8


def test_a_head_that_follows_for_nothing() -> None:
    alone = costs({1: 10}, draft=2, other_draft=0.5)
    shared = Costs(alone.verify, alone.draft, None, other_draft=0.5)
    for of in (alone, shared):
        assert price(ONE, Chain(2), of).seconds[0] == 2 * 10 + 4 * 2.5


def test_flags_are_those_of_llama_server() -> None:
    assert flags_of(NO_DRAFTING) == ["--spec-type", "none"]
    assert flags_of(Chain(5, 0.3, 1)) == [
        "--spec-type", "draft-mtp", "--spec-draft-n-max", "5", "--spec-draft-n-min", "1",
        "--spec-draft-p-min", "0.3",
    ]  # fmt: skip
    for policy in (Tree.chain(2), GatedSiblings(2), AdaptiveDepth(2)):
        with pytest.raises(InputError, match=r"llama\.cpp runs chains only"):
            flags_of(policy)


def test_names() -> None:
    class Own(Policy):
        def draft(self, root: object) -> int:
            return 0

    named = {
        NO_DRAFTING: ("none", "no drafting"),
        Chain(3): ("chain", "n_max 3, p_min 0"),
        Tree.chain(1): ("tree", "tree of 1 node"),
        GatedSiblings(2, 0.5): ("gated", "gated, n_max 2, p_min 0.5"),
        AdaptiveDepth(8, low=2): ("adaptive", "adaptive 2-8, p_min 0"),
        Own(): ("own", "Own"),
    }
    assert {policy: (kind_of(policy), label(policy)) for policy in named} == named


def test_figures_of_one() -> None:
    assert Figure(1.1, 1.01, 1.2).above_1
    assert not Figure(1.1, 0.9, 1.2).above_1
    assert Figure(0.9, 0.8, 0.99).below_1
    assert not Figure(0.9, 0.8, 1.0).below_1
    assert Figure(1.1, None, None).above_1
    assert Figure(0.9, None, None).below_1


# ---- trees as the driver sends them


def test_rows_where_each_leaf_is_a_chain() -> None:
    tree = Tree([(1,), (2,), (1, 1), (1, 2)])  # 2 nodes, then 4; leaves (2), (1, 1), (1, 2)
    assert sent_rows(tree, 5, "coupled").tolist() == [1, 2, 3, 4, 5]
    assert sent_rows(tree, 5, "chains").tolist()[::2] == [3, 6, 9]
    gate = GatedSiblings(2)
    assert sent_rows(gate, 5, "coupled").tolist() == [1, 2, 3, 4, 5]
    assert set(sent_rows(gate, 5, "chains").tolist()) == {9}  # 3 leaves of 2, filled up
    assert sent_rows(Chain(2), 3, "chains").tolist() == [1, 2, 3]
    assert sent_rows(NO_DRAFTING, 1, "chains").tolist() == [1]


def test_a_tree_of_chains_costs_what_its_rows_do() -> None:
    tree = Tree([(1,), (2,)])
    done = totals(ONE, tree)
    (priced,) = Pricer(COSTS, 1, memory="chains").price([(tree, done)])
    # 2 leaves of 2 rows: 13 + (13 - 10) / 2.
    assert priced.parts["verify"][0] == 3 * 14.5
    assert priced.rows == 4
    assert priced.extrapolated
    check = {"tree_target": {"measured": 3.0, "by_medians": 2.0, "by_means": 2.0},
             "tree_rest": {"measured": 5.0, "by_medians": 4.0, "by_means": 4.0}}  # fmt: skip
    slower = replace(COSTS, facts={"check": check})
    (again,) = Pricer(slower, 1, memory="chains").price([(tree, done)])
    assert again.parts["verify"][0] == pytest.approx(1.5 * 3 * 14.5)
    assert again.bare[0] == pytest.approx(1.5 * 3 * 10)
    for part in ("follow", "draft", "other"):
        assert again.parts[part][0] == pytest.approx(1.25 * priced.parts[part][0])
    # Steps of 1, 2 and 1 rows: two that llama.cpp has to build a graph for.
    shaped = replace(COSTS, other_shape=0.75)
    bushy = Tree([(1,), (2,), (1, 1), (2, 1), (1, 1, 1)])
    deep = trace(text([[1, 0, 0]] * 6))
    more = price(deep, bushy, shaped).parts["draft"][0] - price(deep, bushy).parts["draft"][0]
    assert more == pytest.approx(2 * 0.75 * float(totals(deep, bushy).verifications.sum()))
    # Chains are what they were, also as trees.
    for one in (Chain(2), Tree.chain(2)):
        assert price(ONE, one, slower).parts["verify"][0] == price(ONE, one).parts["verify"][0]
    assert price(ONE, Chain(2), slower).seconds[0] == price(ONE, Chain(2)).seconds[0]


def test_what_a_row_may_cost_for_a_tree_to_pay() -> None:
    tree, chain, none = (price(ONE, p) for p in (Tree([(1,), (2,)]), Chain(1), NO_DRAFTING))
    # A pass of 3 rows takes 13 instead of 10: a row more is 15 % of a single one.
    assert row_cost(tree) == pytest.approx(0.15)
    assert row_cost(none) is None
    # 6 tokens: the tree takes 3 * (10 + 20 r + 4) + 1.5, no drafting 6 * 10.75, the chain
    # 4 * (10 + 10 r + 4) + 1.5.
    assert break_even(tree, [none]) == pytest.approx((64.5 - 43.5) / 60)
    assert break_even(tree, [chain]) == pytest.approx((57.5 - 43.5) / (60 - 40))
    assert break_even(tree, [none, chain]) == pytest.approx(21 / 60)
    # With a head that takes 20 a step nothing helps; against itself nothing matters.
    slow = costs({1: 10, 3: 13}, draft=20)
    assert break_even(price(ONE, Tree([(1,), (2,)]), slow), [price(ONE, NO_DRAFTING, slow)]) is None
    assert break_even(tree, [tree]) == float("inf")
