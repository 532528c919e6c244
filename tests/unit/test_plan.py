"""What a plan says in each case, its figures worked out on paper."""

from __future__ import annotations

import json

import handmade
import numpy as np
import pytest
from handmade import COSTS, TWO, costs, text, trace

from mtpstats import plan as plans
from mtpstats import result as results
from mtpstats.cost import Costs
from mtpstats.errors import InputError
from mtpstats.policy import Chain, Tree
from mtpstats.price import flags_of
from mtpstats.report import plan as report
from mtpstats.trace import Trace

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


def test_a_step_may_make_no_difference() -> None:
    assert [plans.Step("", tokens, 0.1).pays for tokens in (0.11, 0.103, 0.097, 0.09)] == [
        True, None, None, False,
    ]  # fmt: skip


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
