"""Predictions worked out on paper, and what a plan says in each case."""

from __future__ import annotations

import json
from dataclasses import replace

import handmade
import numpy as np
import pytest
from handmade import MISSES, MIXED, costs, text, trace

from mtpstats import plan as plans
from mtpstats import result as results
from mtpstats.breakeven import break_even, row_cost
from mtpstats.cost import Costs, Curve, Point
from mtpstats.errors import InputError
from mtpstats.policy import AdaptiveDepth, Chain, GatedSiblings, Policy, Tree
from mtpstats.price import NO_DRAFTING, Figure, Priced, Pricer, flags_of, kind_of, label, sent_rows
from mtpstats.replay import totals
from mtpstats.report import plan as report
from mtpstats.trace import Trace

COSTS = costs(
    {1: 10, 2: 11, 3: 13}, draft=2, follow={1: 1, 3: 2}, other_verification=0.5, other_token=0.25,
    other_plain=0.5,
)  # fmt: skip
ONE = trace(text(MIXED))
TWO = trace(text(MIXED), text(MISSES, "b"))


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


def test_a_step_may_make_no_difference() -> None:
    assert [plans.Step("", tokens, 0.1).pays for tokens in (0.11, 0.103, 0.097, 0.09)] == [
        True, None, None, False,
    ]  # fmt: skip


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
        pass

    named = {
        NO_DRAFTING: ("none", "no drafting"),
        Chain(3): ("chain", "n_max 3, p_min 0"),
        Tree.chain(1): ("tree", "tree of 1 node"),
        GatedSiblings(2, 0.5): ("gated", "gated, n_max 2, p_min 0.5"),
        AdaptiveDepth(8, low=2): ("adaptive", "adaptive 2-8, p_min 0"),
        Own(): ("own", "Own"),
    }
    assert {policy: (kind_of(policy), label(policy)) for policy in named} == named


# ---- whole plans. Every root has the same ranks, so that n_max n accepts min(n, hits).


def even(hits: int, name: str, n: int = 60, sure: float = 1.0) -> handmade.TracedPrompt:
    return text([[1] * hits + [0] * (5 - hits)] * n, name, sure)


def recorded(*hits: int, sure: float = 1.0) -> Trace:
    return trace(*(even(h, f"{i}", sure=sure) for i, h in enumerate(hits)))


FLAT = costs({1: 10}, draft=1)  # a pass takes 10 s, a step 1 s


def test_defaults_that_are_best() -> None:
    # Tokens over seconds: 2/11, 3/12, 4/13, 4/14, 4/15: n_max 3.
    plan = plans.make(recorded(3, 3, 3), FLAT)
    assert plan.chain is plan.default is plan.recommended
    assert plan.flags() == flags_of(Chain(3))
    assert plans.verdict(plan) == (
        "Draft with llama.cpp's defaults, n_max 3, p_min 0: no other chain is faster, at 3.08 "
        "(3.08 to 3.08) times the speed of no drafting."
    )
    assert plan.limits.most == "head"
    assert plan.limits.free == pytest.approx({"head": 1.3, "rows": 1.0, "acceptance": 1.0})
    assert plan.limits.shares == pytest.approx(
        {"target": 10 / 13, "rows": 0, "follow": 0, "draft": 3 / 13, "other": 0}
    )
    better, worse, *_ = plan.limits.steps
    assert (better.name, better.pays) == ("n_max 3 rather than 2", True)
    assert better.tokens == pytest.approx(1 / 3, abs=0.02)
    assert better.seconds == pytest.approx(1 / 12)
    assert (worse.name, worse.pays) == ("n_max 4 rather than 3", False)
    assert (worse.tokens, worse.seconds) == (pytest.approx(0), pytest.approx(1 / 13))


def test_a_chain_that_is_better_than_the_defaults() -> None:
    # n_max 5: 6 tokens for 15 s; the defaults: 4 for 13 s; nothing: 1 for 10 s.
    plan = plans.make(recorded(5, 5, 5), FLAT)
    assert plan.recommended is plan.chain
    assert plan.flags() == flags_of(Chain(5))
    assert plans.verdict(plan) == (
        "Draft with n_max 5, p_min 0: 4.00 (4.00 to 4.00) times the speed of no drafting and 1.30 "
        "(1.30 to 1.30) times that of llama.cpp's defaults."
    )
    assert "n_max 6 to 16 are not in the plan, and the fastest chain is as deep" in plan.notes[1]


def test_do_not_draft() -> None:
    # Even with every draft accepted: 2 tokens for 11 + 10 s, 6 for 10 + 55 s.
    plan = plans.make(recorded(5, 5, 5), costs({1: 10}, draft=11))
    assert plan.recommended is plan.none
    assert plan.flags() == ["--spec-type", "none"]
    assert plans.verdict(plan) == (
        "Do not draft: the fastest chain, n_max 1, p_min 0, would run at 0.95 (0.95 to 0.95) "
        "times the speed of no drafting."
    )
    assert not plan.wide.rate.value > plan.none.rate.value


def test_too_close_to_tell_whether_to_draft() -> None:
    # n_max 1 with a step of 6 s: 2/16 where it hits, 1/16 where not, 1/10 without drafting. Two
    # texts hit, one does not: 180 tokens for 30 * 16 * 2 + 60 * 16 = 1920 s, at 0.94 times the
    # speed; all three may be of either kind in a resample: from 0.62 to 1.25.
    plan = plans.make(recorded(1, 1, 0), costs({1: 10}, draft=6))
    assert plan.recommended is plan.none
    assert plan.flags() == ["--spec-type", "none"]
    assert plans.verdict(plan) == (
        "Too close to tell whether drafting pays: the fastest chain, n_max 1, p_min 0, would run "
        "at 0.94 (0.62 to 1.25) times the speed of no drafting."
    )
    # With a step of 5 s the figure is 1800 / 1800 = 1; with 4 s it is above 1, and stands.
    plan = plans.make(recorded(1, 1, 0), costs({1: 10}, draft=4))
    assert plan.recommended is plan.chain
    assert "Too close to tell" in plans.verdict(plan)
    assert "1.07 (0.71 to 1.43)" in plans.verdict(plan)


def test_too_close_to_the_defaults_leaves_the_defaults() -> None:
    # n_max 4 takes 14 s for 5 tokens or 2, the defaults 13 s for 4 or 2: 12.6 against 13 s for 3
    # tokens of either text. Only where all texts are of the second kind it is slower.
    plan = plans.make(recorded(4, 4, 1), FLAT)
    assert plan.chain.policy == Chain(4)
    assert plan.recommended is plan.default
    assert plan.flags() == flags_of(Chain(3))
    words = plans.verdict(plan)
    assert words.startswith("Draft with llama.cpp's defaults, n_max 3, p_min 0, at 2.31 (")
    assert "n_max 4, p_min 0 is too close to them to tell, at 1.03 (0.93 to 1.16) times" in words


def test_defaults_that_may_lose_are_not_kept() -> None:
    # n_max 1 surely pays: 2 tokens for 14 s. The defaults take 22 s for 2 tokens or 4; the best
    # chain is not surely better than they are, but they are not surely better than nothing.
    plan = plans.make(recorded(3, 3, 1), costs({1: 10}, draft=4))
    assert plan.chain.over(plan.none).above_1
    assert not plan.default.over(plan.none).above_1
    assert not plan.chain.over(plan.default).above_1
    assert plan.recommended is plan.chain
    assert "llama.cpp's defaults are too close to tell" in plans.verdict(plan)


def test_p_min_is_used_where_it_pays() -> None:
    # Where nothing is accepted the head is unsure: p_min above 0.05 ends the draft after a step.
    hits, misses = even(5, "a", sure=0.95), even(0, "b", sure=0.05)
    plan = plans.make(trace(hits, misses), costs({1: 10}, draft=3))
    assert plan.chain.policy == Chain(5, 0.1)
    # 60 tokens by 10 passes of 10 + 15 s, 60 by 60 passes of 10 + 3 s.
    assert plan.chain.rate.value == pytest.approx(120 / (10 * 25 + 60 * 13))
    assert flags_of(plan.chain.policy)[-1] == "0.1"


def test_no_depth_for_the_defaults() -> None:
    plan = plans.make(TWO, COSTS)
    assert plan.default is None
    assert "Draft with n_max 2, p_min 0:" in plans.verdict(plan) or "Too close" in plans.verdict(
        plan
    )
    assert any("the trace is 2 deep: n_max 3 to 16 are not in the plan" in n for n in plan.notes)


def test_a_chain_of_heads_is_no_deeper_than_its_blocks() -> None:
    texts = [text([[1, 1]] * 60, name) for name in "ab"]
    plan = plans.make(trace(*texts, heads="chain", n_blocks=2), FLAT)
    assert plan.deepest == 2
    assert plan.default.policy == Chain(2)  # what n_max 3 comes to
    assert not any("not in the plan" in note for note in plan.notes)


def test_a_single_prompt_has_no_interval_and_says_so() -> None:
    plan = plans.make(recorded(5), FLAT)
    assert plans.verdict(plan).endswith("llama.cpp's defaults, going by a single prompt.")
    assert "4.00 times the speed" in plans.verdict(plan)
    assert plan.notes[0] == "a single prompt tells no interval"
    assert all(p.in_sample is None and p.rate.lo is None for p in plan.policies)


# ---- trees


def second_choices(rank: int, name: str) -> handmade.TracedPrompt:
    """Texts in which one and the same rank is right every time."""
    return text([[rank] * 2] * 40, name)


def test_a_tree_is_scored_on_prompts_it_was_not_chosen_on() -> None:
    # Two texts: one wants the first choices, one the second. What the one text chooses is wrong
    # for the other, so the best tree of 2 nodes, 3 tokens a pass where it fits, gives 1 there.
    plan = plans.make(trace(second_choices(1, "a"), second_choices(2, "b")), FLAT)
    two = plan.trees()[2]
    assert two.length == pytest.approx(1)
    assert two.in_sample is not None
    # Of the two texts together the best are (1,) and (2,): 2 tokens a pass of 10 + 1 s.
    assert two.policy == Tree([(1,), (2,)])
    assert two.in_sample.value == pytest.approx(2 / 11)


def test_what_wider_would_add() -> None:
    # Both texts want (2, 2): a tree of 2 nodes takes 14 passes of 12 s, the best chain, whose
    # tokens are all rejected, 40 of 11 s: 440 / 168 = 2.62.
    plan = plans.make(trace(second_choices(2, "a"), second_choices(2, "b")), FLAT)
    assert plan.wide.policy == Tree([(2,), (2, 2)])
    assert plan.recommended is plan.none
    assert plans.wider(plan).startswith(
        "Wider would pay, in an engine that can: the best of trees, gates and adaptive depth "
        "(tree of 2 nodes, scored on prompts it was not chosen on) would run at 2.62 "
    )
    plan = plans.make(recorded(3, 3, 3), FLAT)
    assert plans.wider(plan).startswith("Wider does not pay")
    assert "1.00 (1.00 to 1.00)" in plans.wider(plan)


def test_rows_that_cost_make_wider_lose() -> None:
    texts = [text(([[1, 0]] * 9 + [[2, 0]]) * 6, name) for name in "ab"]
    plan = plans.make(trace(*texts), costs({1: 10, 2: 10, 3: 40}, draft=1))
    assert plan.wide.nodes == plan.chain.nodes  # not one node more is worth its row
    assert plans.wider(plan).startswith("Wider does not pay")
    # First and second choice: 2 tokens for 41 s, against at most 2 for 11 s, at least 1.8.
    assert 11 / 41 <= plan.trees()[2].over(plan.chain).value < 11 / 41 / 0.9 + 0.01


def test_wider_may_be_too_close_to_tell() -> None:
    # A tree of 2 nodes, (1,) and (2,), is right in both kinds of text; n_max 1 in one of them. 4
    # texts, so that either half has both kinds.
    kinds = [text([[1, 0]] * 40, "a"), text([[2, 0]] * 40, "b")]
    texts = [kinds[i % 2] for i in range(4)]
    plan = plans.make(trace(*texts), costs({1: 10, 2: 10, 3: 13}, draft=1))
    assert plan.wide.over(plan.chain).lo < 1 < plan.wide.over(plan.chain).hi
    assert plans.wider(plan).startswith("Whether wider pays is too close to tell")


def test_no_right_candidate_no_tree() -> None:
    plan = plans.make(recorded(0, 0), FLAT)
    assert plan.trees() == {}
    assert plan.best("tree") is None
    assert plan.recommended is plan.none


# ---- the rest


def test_pareto_holds_what_nothing_else_beats() -> None:
    plan = plans.make(recorded(3, 3, 1), FLAT)
    points = [(p.period, p.length) for p in plan.policies]
    front = [(p.period, p.length) for p in plan.pareto]
    assert front == sorted(front)
    for period, length in points:
        beaten = any(
            (a <= period and b > length) or (a < period and b >= length) for a, b in points
        )
        assert ((period, length) in front) != beaten


def test_every_other_root_is_judged_by_uniform_starts() -> None:
    texts = [even(3, "a"), even(3, "b")]
    full = trace(*texts)
    every = trace(
        *(
            handmade.TracedPrompt(
                **{
                    **vars(t), "roots": t.roots[::2], "rank": t.rank[::2], "p": t.p[::2],
                    "top10": t.top10[::2], "p_min_p": t.p_min_p[::2], "overlap": t.overlap[::2],
                }
            )
            for t in texts
        ),
        every=2,
    )  # fmt: skip
    plan = plans.make(every, FLAT)
    assert plan.starts == "uniform"
    assert "every 2th root was recorded, so runs cannot be replayed" in plan.notes[0]
    assert plan.best("adaptive") is None
    # Away from the end of the text uniform starts are like any other here.
    assert plan.chain.policy == plans.make(full, FLAT).chain.policy == Chain(3)


def test_the_same_seed_gives_the_same_plan() -> None:
    made = [plans.to_dict(plans.make(recorded(4, 2, 1), FLAT, seed=s)) for s in (1, 1)]
    assert made[0] == made[1]


def test_nothing_to_plan_from() -> None:
    with pytest.raises(InputError, match="holds no prompt"):
        plans.make(Trace(TWO.header, []), COSTS)
    empty = trace(text([[0, 0]], "a"))
    bare = handmade.TracedPrompt(
        **{
            **vars(empty.prompts[0]), "tokens": np.arange(1), "margin": np.ones(0), "stop": "nan",
            **{k: vars(empty.prompts[0])[k][:0] for k in
               ("roots", "rank", "p", "top10", "p_min_p", "overlap")},
        }
    )  # fmt: skip
    with pytest.raises(InputError, match="holds no verification"):
        plans.make(trace(bare), COSTS)


def test_notes_of_costs_of_another_model_and_of_a_cut_trace() -> None:
    texts = [even(3, "a"), even(3, "b")]
    other = trace(*texts, model={"sha256": "aa", "file": "m.gguf"})
    told = plans.make(
        Trace(other.header, other.prompts, incomplete="prompt 3 is cut off"),
        Costs(FLAT.verify, FLAT.draft, FLAT.follow, facts={"model": {"sha256": "bb"}}),
    )
    assert told.notes[0] == "the trace is incomplete: prompt 3 is cut off"
    assert "the costs were measured with another model" in told.notes
    assert any("costs are measured up to 1 rows" in note for note in told.notes)


def test_a_machine_that_was_busy_is_said() -> None:
    # Quartiles of 8, 9, 10, 11, 12 are 9 and 11: 20 % of 10; of 8, 8, 10, 12, 12 they are 40 %.
    for samples, words in (([8, 9, 10, 11, 12], None), ([8, 8, 10, 12, 12], "more than 40 %")):
        plan = plans.make(recorded(3, 3), costs({1: samples}, draft=1))
        told = [note for note in plan.notes if "not at rest" in note]
        assert len(told) == (words is not None)
        assert words is None or words in told[0]


def test_json_has_every_series_and_no_nan() -> None:
    plan = plans.make(recorded(3, 3, 1), FLAT)
    record = json.loads(results.dumps(plans.to_dict(plan)))
    assert record["schema"] == "mtpstats.plan/1"
    chains = {(p["n_max"], p["p_min"]) for p in record["policies"] if p["kind"] == "chain"}
    assert chains == {(n, round(0.1 * i, 1)) for n in range(1, 6) for i in range(10)}
    trees = [p for p in record["policies"] if p["kind"] == "tree"]
    assert [p["n_nodes"] for p in trees] == list(range(1, len(trees) + 1))
    best = record["policies"][record["chain"]]
    assert best["policy"] == plan.chain.spec
    assert best["tokens_per_second"]["value"] == plan.chain.rate.value
    assert sum(best["shares"].values()) == pytest.approx(1)
    assert record["policies"][record["none"]]["policy"] == "none"
    assert record["flags"] == plan.flags()
    assert record["costs"]["verify"]["1"]["median"] == 10


def test_the_report_fits_80_columns_of_ascii() -> None:
    for plan in (
        plans.make(recorded(3, 3, 1), FLAT),
        plans.make(recorded(5), costs({1: 1e-6}, draft=1e-7)),
        plans.make(recorded(0, 0), costs({1: 1e4, 33: 1e5}, draft=1e3, n_past=100)),
        plans.make(TWO, COSTS),
    ):
        lines = report.render(plan).splitlines()
        assert max(map(len, lines)) <= 80, max(lines, key=len)
        assert all(line.isascii() for line in lines)
        assert plans.verdict(plan) in " ".join(" ".join(lines).split())


def test_the_report_shows_the_command_to_paste() -> None:
    texts = [even(5, "a"), even(5, "b")]
    plan = plans.make(trace(*texts, model={"file": "my model.gguf"}), FLAT)
    shown = report.render(plan)
    joined = " ".join(shown.replace("\\\n", " ").split())
    assert (
        "llama-server -m 'my model.gguf' --spec-type draft-mtp --spec-draft-n-max 5 "
        "--spec-draft-p-min 0"
    ) in joined
    row = next(line for line in shown.splitlines() if line.startswith("no drafting"))
    assert row.split() == ["no", "drafting", "1.00", "0.00", "10,000", "0.1", "(0.1-0.1)", "1.00"]


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
