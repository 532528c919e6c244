"""Replay: against live runs of the product's own driver on a toy model, and by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Toy, live, trace_of

from mtpstats import replay as replays
from mtpstats.policy import Chain
from mtpstats.speculate import DraftSettings
from mtpstats.stats import Snapshot

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
    trace = trace_of(toy, depth=DEPTH, n_predict=n_predict)
    replayed = replays.replay(trace, Chain(flags.n_max, flags.p_min, flags.n_min), n_ctx=n_ctx)
    one = replayed.prompts[0]
    assert [tuple(pair) for pair in one.verifications.tolist()] == lived.verifications
    assert one.tokens == len(lived.tokens)
    assert one.stop == lived.stop
    assert (replayed.drafted, replayed.accepted) == (lived.drafted, lived.accepted)
    assert_same_counters(one.snapshot, lived.snapshot)
