"""Replay: against live runs of the product's own driver on a toy model, and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import reference_replay
from hypothesis import given, settings
from hypothesis import strategies as st
from made import by_chance, trace
from reference_replay import chain, tree
from toy import Toy, live, trace_of

from mtpstats.policy import AdaptiveDepth, Chain, GatedSiblings, Policy, Tree
from mtpstats.replay import Replay, replay, totals
from mtpstats.speculate import DraftSettings
from mtpstats.stats import Snapshot
from mtpstats.trace import Trace

DEPTH = 6


def assert_same_counters(replayed: Snapshot, lived: Snapshot) -> None:
    """Equal but for the last bits of sum_p_top10 (a trace holds quotients of rounded numbers) and
    the rows with a NaN, which no trace holds."""
    mine, theirs = replayed.to_dict(), lived.to_dict()
    del mine["nan_rows"], theirs["nan_rows"]
    a, b = np.array(mine.pop("sum_p_top10")), np.array(theirs.pop("sum_p_top10"))
    for name in theirs:
        assert mine[name] == theirs[name], name
    assert np.abs(a - b).max() <= 4e-7 * max(1, lived.verifications)


@st.composite
def situations(draw):
    """(toy, flags, n_predict, n_ctx) of a live run."""
    heads = draw(st.sampled_from(["single", "chain", "shared"]))
    n_predict = draw(st.integers(0, 30))
    n_prompt = draw(st.integers(1, 5))
    toy = Toy(
        seed=draw(st.integers(0, 10**6)),
        n_prompt=n_prompt,
        n_text=n_prompt + n_predict + DEPTH + 2,
        lean=draw(st.sampled_from([1.0, 2.5, 5.0])),
        heads=heads,
        n_blocks=draw(st.integers(2, DEPTH)) if heads == "chain" else 1,
        dead=tuple(draw(st.sets(st.integers(0, 30), max_size=2))),
    )
    if draw(st.booleans()):
        toy.eog_at = draw(st.integers(n_prompt, toy.n_text - 1))
        toy.__post_init__()
    n_max = draw(st.integers(1, DEPTH))
    blocks = min(n_max, toy.n_blocks) if heads == "chain" else n_max
    flags = DraftSettings(
        n_max,
        n_min=draw(st.integers(0, blocks)) if draw(st.booleans()) else 0,
        p_min=draw(st.sampled_from([0.0, 0.0, 0.2, 0.4, 0.7])),
    )
    n_ctx = draw(st.integers(n_prompt, n_prompt + n_predict + 8)) if draw(st.booleans()) else None
    return toy, flags, n_predict, n_ctx


@given(situations())
@settings(max_examples=60, deadline=None)
def test_a_replayed_chain_is_the_live_run(situation):
    toy, flags, n_predict, n_ctx = situation
    lived, _ = live(toy, flags, n_predict, n_ctx or 1000)
    recording = trace_of(toy, depth=DEPTH, n_predict=n_predict)
    replayed = replay(recording, Chain(flags.n_max, flags.p_min, flags.n_min), n_ctx=n_ctx)
    one = replayed.prompts[0]
    assert [tuple(pair) for pair in one.verifications.tolist()] == lived.verifications
    assert one.tokens == len(lived.tokens)
    assert one.stop == lived.stop
    assert (replayed.drafted, replayed.accepted) == (lived.drafted, lived.accepted)
    assert_same_counters(one.snapshot, lived.snapshot)


def test_a_draft_in_which_the_head_fails_is_thrown_away():
    # At its first root, 4, the toy's head has no finite logit after one token that was drafted.
    lived, _ = live(Toy(seed=1, n_prompt=5, dead=(4,)), DraftSettings(3), n_predict=6)
    assert lived.verifications[0] == (0, 0)
    assert lived.verifications[1][0] == 3
    assert lived.snapshot.invalid == 1


# ---- every policy against replay in plain Python


@st.composite
def recorded(draw):
    """(prompts, options of replay())."""
    n_generated = draw(st.integers(1, 25))
    every = draw(st.sampled_from([1, 1, 1, 2, 3]))
    seed = draw(st.integers(0, 10**6))
    prompts = [
        by_chance(
            seed + i,
            n_generated=n_generated,
            n_prompt=draw(st.integers(1, 3)),
            stop=draw(st.sampled_from(["n_predict", "eog"])),
            every=every,
            lean=draw(st.sampled_from([0.3, 0.6, 0.9])),
        )
        for i in range(2)
    ]
    options = {}
    if every > 1 or draw(st.booleans()):
        options["starts"] = "uniform"
    if draw(st.booleans()):
        options["n_predict"] = draw(st.integers(0, n_generated))
    if draw(st.booleans()):
        options["n_ctx"] = draw(st.integers(1, n_generated + 4))
    return trace(*prompts, every=every), options


def check(found: Replay, expected: list[reference_replay.Result]) -> None:
    """Compare with the reference, prompt by prompt."""
    totals = found.totals
    for i, (one, other) in enumerate(zip(found.prompts, expected, strict=True)):
        assert [tuple(pair) for pair in one.verifications.tolist()] == other.verifications
        assert one.tokens == other.tokens == totals.tokens[i]
        assert one.stop == other.stop
        mine = one.snapshot.to_dict()
        sums = np.array(mine.pop("sum_p_top10")) * 2.0**24
        assert np.abs(sums - other.counts.pop("sum_p_top10")).max() <= len(other.verifications)
        mine["sum_p"] = (np.array(mine["sum_p"]) * 2**24).tolist()
        for name, value in other.counts.items():
            assert mine[name] == value, name
        assert totals.verifications[i] == len(other.verifications)
        assert totals.drafted[i] == sum(drafted for drafted, _ in other.verifications)
        assert totals.accepted[i] == sum(accepted for _, accepted in other.verifications)
        for counts, histogram in (
            (totals.rows, other.rows),
            (totals.widths, other.widths),
            (totals.lengths, other.lengths),
        ):
            assert {int(j): int(counts[i, j]) for j in np.flatnonzero(counts[i])} == histogram


def simulated(trace: Trace, options: dict, propose: reference_replay.Propose, **more: Any) -> list:
    return [
        reference_replay.simulate(
            reference_replay.Text.of(prompt, trace.every),
            propose,
            n_predict=options.get("n_predict", -1),
            n_ctx=options.get("n_ctx"),
            uniform=options.get("starts") == "uniform",
            **more,
        )
        for prompt in trace.prompts
    ]


@given(recorded(), st.data())
@settings(max_examples=100, deadline=None)
def test_chains_and_gates_against_plain_python(case, data):
    trace, options = case
    n_max = data.draw(st.integers(1, 4))
    n_min = data.draw(st.integers(0, n_max)) if data.draw(st.booleans()) else 0
    p_min = data.draw(st.sampled_from([0.0, 0.3, 0.6]))
    policy = Chain(n_max, p_min, n_min)
    check(replay(trace, policy, **options), simulated(trace, options, chain(n_max, p_min, n_min)))
    gate = data.draw(st.tuples(*[st.sampled_from([0.0, 0.1, 0.5, 1.0])] * 3))
    gated = GatedSiblings(n_max, p_min, n_min, *gate)
    check(
        replay(trace, gated, **options), simulated(trace, options, chain(n_max, p_min, n_min, gate))
    )


@st.composite
def trees(draw, depth=4):
    paths = set()
    for path in draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=depth), max_size=6)):
        paths |= {tuple(path[:n]) for n in range(1, len(path) + 1)}
    return paths


@given(recorded(), trees())
@settings(max_examples=100, deadline=None)
def test_trees_against_plain_python(case, paths):
    trace, options = case
    check(replay(trace, Tree(paths), **options), simulated(trace, options, tree(paths)))


@given(recorded(), st.data())
@settings(max_examples=50, deadline=None)
def test_adaptive_depth_against_plain_python(case, data):
    trace, options = case
    options = {key: value for key, value in options.items() if key != "starts"}
    if trace.every > 1:
        return
    low = data.draw(st.integers(1, 4))
    first = data.draw(st.integers(low, 4))
    up, down = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    expected = []
    for prompt in trace.prompts:
        now = [first]

        def heard(drafted, accepted, now=now):
            if drafted:
                now[0] = min(4, now[0] + up) if accepted == drafted else max(low, now[0] - down)

        def propose(text, r, limit, now=now):
            return chain(now[0], 0.3)(text, r, limit)

        one = Trace(trace.header, [prompt])
        expected += simulated(one, options, propose, heard=heard)
    policy = AdaptiveDepth(4, low=low, start=first, up=up, down=down, p_min=0.3)
    check(replay(trace, policy, **options), expected)


@given(recorded(), st.integers(1, 4), trees())
@settings(max_examples=50, deadline=None)
def test_a_policy_in_python_counts_as_the_compiled_one(case, n, paths):
    trace, options = case
    given_tree = Tree(paths)

    class Fixed(Policy):
        def __init__(self, draft):
            self.chosen = draft

        def draft(self, root):
            return self.chosen

    for mine, compiled in ((n, Chain(n)), (given_tree, given_tree)):
        a, b = replay(trace, Fixed(mine), **options), replay(trace, compiled, **options)
        assert a.snapshot == b.snapshot
        for one, other in zip(a.prompts, b.prompts, strict=True):
            assert one.verifications.tolist() == other.verifications.tolist()
            assert (one.tokens, one.stop) == (other.tokens, other.stop)
        for name in ("tokens", "drafted", "accepted", "rows", "widths", "lengths"):
            assert getattr(a.totals, name).tolist() == getattr(b.totals, name).tolist()


@given(recorded(), trees())
@settings(max_examples=30, deadline=None)
def test_totals_are_those_of_the_full_replay(case, paths):
    trace, options = case
    for policy in (Chain(3, 0.3), Tree(paths), GatedSiblings(3, p1_max=0.6)):
        full, light = replay(trace, policy, **options).totals, totals(trace, policy, **options)
        for name in ("tokens", "verifications", "drafted", "accepted", "rows", "widths", "lengths"):
            assert getattr(full, name).tolist() == getattr(light, name).tolist()
