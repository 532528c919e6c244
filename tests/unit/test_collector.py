"""The collector: every edge rule by name, and all of it against a plain-Python reference."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpstats import _core
from mtpstats.errors import InputError
from mtpstats.stats import Collector, Snapshot, compact

VOCAB = 30


def row(*order: int, vocab: int = VOCAB) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits that put these tokens first, in this order, then the rest by id."""
    logits = -0.5 * np.arange(vocab, dtype=np.float32) - 10
    logits[list(order)] = -0.25 * np.arange(len(order), dtype=np.float32)
    return logits


def feed(c: Collector, n_past: int, id_last: int, *bests: int, seq: int = 0) -> None:
    """A draft whose candidates are best, best + 1, ..., best + 7 at each position."""
    c.draft(seq, n_past, id_last)
    for i, best in enumerate(bests):
        c.candidates(seq, i, row(*range(best, best + 8)))


def counts(s: Snapshot, n: int = 4) -> dict[str, list[int]]:
    return {k: getattr(s, k)[:n].tolist() for k in ("drafted", "reached", "accepted")}


# ---- what two calls say


def test_accepted_prefix_and_rank_of_the_rejected_position() -> None:
    c = Collector()
    feed(c, 10, 1, 2, 4, 6)
    c.draft(0, 12, 5)  # one accepted; at position 1 the target chose 5, the second candidate
    s = c.snapshot()
    assert counts(s) == {"drafted": [1, 1, 1, 0], "reached": [1, 1, 0, 0], "accepted": [1, 0, 0, 0]}
    assert s.rank[0].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert s.rank[1].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert s.miss.sum() == 0
    assert s.verifications == 1


def test_bonus_token_belongs_to_no_position() -> None:
    c = Collector()
    feed(c, 10, 1, 2, 4)
    c.draft(0, 13, 5)
    s = c.snapshot()
    assert counts(s, 3) == {"drafted": [1, 1, 0], "reached": [1, 1, 0], "accepted": [1, 1, 0]}
    assert s.rank.sum() == 2
    assert s.censored[0].tolist() == [0, 0, 1] + [0] * 13


def test_miss_is_a_choice_outside_the_eight() -> None:
    c = Collector()
    feed(c, 0, 1, 2)
    c.draft(0, 1, 10)  # candidates were 2..9
    assert c.snapshot().miss[0] == 1
    assert c.snapshot().rank.sum() == 0


def test_probabilities_are_added_over_reached_positions() -> None:
    c = Collector()
    logits = row(3, 7, 9)
    c.draft(0, 0, 1)
    c.candidates(0, 0, logits)
    c.candidates(0, 1, logits)
    c.draft(0, 1, 7)
    s = c.snapshot()
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum()
    ten = np.sort(logits.astype(float))[::-1][:10]
    p10 = np.exp(ten) / np.exp(ten).sum()
    assert s.sum_p[0, 0] == pytest.approx(p[3], abs=2**-24)
    assert s.sum_p[0, 1] == pytest.approx(p[7], abs=2**-24)
    assert s.sum_p_top10[0].tolist() == pytest.approx(p10[:8].tolist(), abs=2**-24)
    assert s.sum_p[1].sum() == 0  # drafted, not reached
    decile = int(p[3] * 10)
    assert s.calib_p1[0, decile].tolist() == [1, 0]
    assert s.calib_p2[0, int(p[7] * 10)].tolist() == [1, 1]
    assert s.calib_p1.sum() == 1
    assert s.calib_p2.sum() == 2


# ---- edge rules of DESIGN section 3


@pytest.mark.parametrize("n_past", [0, 5, 9, 10, 15, 500, 2**31 - 1])
def test_edge_context_shift_slot_reuse_rewind(n_past: int) -> None:
    c = Collector()
    feed(c, 10, 1, 2, 4, 6)
    c.draft(0, n_past, 2)
    s = c.snapshot()
    assert s.discarded == 1
    assert s == expected(discarded=1)


def expected(**values: int) -> Snapshot:
    s = Snapshot()
    for name, value in values.items():
        setattr(s, name, value)
    return s


def test_edge_generation_ends_unknown() -> None:
    c = Collector()
    feed(c, 10, 1, 2)
    c.finish(0)
    assert c.snapshot() == expected(unresolved=1)
    c.finish(0)  # nothing is open any more
    assert c.snapshot() == expected(unresolved=1)


def test_edge_generation_ends_known() -> None:
    c = Collector()
    feed(c, 10, 1, 2, 4)
    c.finish(0, 12, 5)
    s = c.snapshot()
    assert counts(s, 2) == {"drafted": [1, 1], "reached": [1, 1], "accepted": [1, 0]}
    assert s.rank[1, 1] == 1
    assert s.unresolved == 0


def test_edge_end_token_inside_the_accepted_prefix() -> None:
    c = Collector()
    feed(c, 10, 1, 2, 4, 6)
    c.verify(0, [2, 4, 6])
    c.finish(0, 12, 4)  # 2 and 4 were accepted, 4 ends the text
    s = c.snapshot()
    assert counts(s) == {"drafted": [1, 1, 0, 0], "reached": [1, 1, 0, 0], "accepted": [1, 1, 0, 0]}
    assert s.rank[:, 0].tolist()[:3] == [1, 1, 0]
    assert s.censored[3].tolist()[:4] == [0, 0, 1, 0]


def test_edge_end_token_is_the_first_of_the_draft() -> None:
    c = Collector()
    feed(c, 10, 1, 2, 4)
    c.finish(0, 11, 2)
    assert counts(c.snapshot(), 2) == {"drafted": [1, 0], "reached": [1, 0], "accepted": [1, 0]}


def test_edge_drafts_longer_than_16() -> None:
    c = Collector()
    feed(c, 0, 1, *([2] * 20))
    c.draft(0, 19, 2)  # 18 accepted
    s = c.snapshot()
    assert s.drafted.tolist() == [1] * 16
    assert s.accepted.tolist() == [1] * 16
    assert (s.beyond_drafted, s.beyond_reached, s.beyond_accepted) == (4, 3, 2)
    assert s.tokens_drafted == 20
    assert s.tokens_accepted == 18
    feed(c, 100, 1, *([2] * 20))
    c.draft(0, 103, 3)
    s = c.snapshot()
    assert s.drafted.tolist() == [2] * 16
    assert s.rank[2].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert (s.beyond_drafted, s.beyond_reached, s.beyond_accepted) == (8, 3, 2)


def test_edge_wholly_accepted_draft_of_16_or_more_is_in_no_length() -> None:
    c = Collector()
    for n in (15, 16, 20):
        feed(c, 0, 1, *([2] * n))
        c.finish(0, n + 1, 2)
    assert c.snapshot().censored.sum() == 1
    assert c.snapshot().censored[0, 15] == 1


def test_edge_fewer_than_8_tokens() -> None:
    c = Collector()
    c.draft(0, 0, 1)
    c.candidates(0, 0, np.array([0.0, 2.0, 1.0], np.float32))
    c.draft(0, 1, 0)
    s = c.snapshot()
    assert s.rank[0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert s.sum_p[0].sum() == pytest.approx(1.0, abs=1e-6)
    assert s.sum_p[0, 3:].sum() == 0
    c.candidates(0, 0, np.array([5.0], np.float32))
    c.draft(0, 3, 0)
    assert c.snapshot().calib_p2.sum() == 1  # a vocabulary of one has no second choice
    assert c.snapshot().calib_p1[0, 9].tolist() == [1, 1]


def test_edge_padded_vocabulary() -> None:
    c = Collector()
    logits = row(3, 4)
    logits[29] = 50
    c.draft(0, 0, 1)
    c.candidates(0, 0, logits, 28)
    c.draft(0, 2, 9)
    s = c.snapshot()
    assert (s.padded_rows, s.nan_rows) == (1, 0)
    assert s.rank[0, 0] == 1  # token 3
    assert s.sum_p[0, 0] == pytest.approx(1 / (1 + math.exp(-0.25)), abs=1e-3)


def test_edge_nan_logits() -> None:
    c = Collector()
    logits = row(3, 4, 5)
    logits[3] = np.nan
    c.draft(0, 0, 1)
    c.candidates(0, 0, logits)
    c.draft(0, 1, 5)
    s = c.snapshot()
    assert s.nan_rows == 1
    assert s.rank[0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_edge_no_finite_logit_makes_the_round_invalid(value: float) -> None:
    c = Collector()
    feed(c, 0, 1, 2)
    c.candidates(0, 1, np.full(VOCAB, value, np.float32))
    c.draft(0, 2, 3)
    s = c.snapshot()
    assert s == expected(invalid=1, nan_rows=int(value != -np.inf))


def test_edge_equal_logits_the_lower_id_first() -> None:
    c = Collector()
    logits = np.zeros(VOCAB, np.float32)
    c.draft(0, 0, 1)
    c.candidates(0, 0, logits)
    c.draft(0, 1, 4)
    assert c.snapshot().rank[0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


def test_edge_draft_token_sampled_not_the_best() -> None:
    c = Collector()
    feed(c, 0, 1, 2, 4)  # best: 2, 4
    c.verify(0, [4, 20])  # rank 3, and a token outside the candidates
    c.draft(0, 3, 9)
    s = c.snapshot()
    assert s.accepted[:2].tolist() == [1, 1]
    assert s.rank[0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert s.miss[1] == 1
    feed(c, 0, 1, 2)
    c.verify(0, [4])
    c.draft(0, 1, 2)  # the head's best was right, the sampled draft was not
    s = c.snapshot()
    assert s.accepted[0] == 1
    assert s.rank[0].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]


def test_edge_counters_are_64_bit() -> None:
    big = expected(verifications=2**64 - 2)
    assert (big + expected(verifications=1)).verifications == 2**64 - 1
    with pytest.raises(InputError, match=r"2\*\*64"):
        Snapshot.merge(big, expected(verifications=2))


# ---- what the loop sent


def test_cut_draft_is_no_rejection() -> None:
    c = Collector()
    feed(c, 0, 1, 2, 4, 6)
    c.verify(0, [2], "budget")
    c.draft(0, 2, 9)
    s = c.snapshot()
    assert counts(s, 2) == {"drafted": [1, 0], "reached": [1, 0], "accepted": [1, 0]}
    assert s.censored[1, 1] == 1
    assert s.cut_tokens == 2


def test_padding_of_a_draft_is_not_drafted() -> None:
    c = Collector()
    feed(c, 0, 1, 2, 4, 6)
    c.verify(0, np.array([2, -1, -1], np.int32))
    c.draft(0, 1, 3)
    assert counts(c.snapshot(), 2) == {"drafted": [1, 0], "reached": [1, 0], "accepted": [0, 0]}


def test_dropped_draft_is_waste_shown_apart() -> None:
    c = Collector()
    feed(c, 0, 1, 2, 4)
    c.drop(0)
    c.draft(0, 1, 2)
    assert c.snapshot() == expected(verifications=1, dropped_drafts=1, dropped_tokens=2)
    c.drop(0)  # a draft of nothing has nothing to throw away
    c.draft(0, 2, 2)
    assert c.snapshot() == expected(verifications=2, dropped_drafts=1, dropped_tokens=2)


def test_p_min_stop_keeps_what_the_target_would_have_said() -> None:
    c = Collector()
    for choice in (4, 5):
        feed(c, 0, 1, 2, 4)
        c.stop(0, 1)
        c.verify(0, [2])
        c.finish(0, 2, choice)
    feed(c, 0, 1, 2, 4)
    c.stop(0, 1)
    c.finish(0, 1, 9)  # the token before the stop was rejected
    s = c.snapshot()
    assert counts(s, 2) == {"drafted": [3, 0], "reached": [3, 0], "accepted": [2, 0]}
    assert (s.stopped[1], s.stopped_reached[1], s.stopped_hit[1]) == (3, 2, 1)
    assert s.censored.sum() == 0


def test_stop_at_once() -> None:
    c = Collector()
    feed(c, 0, 1, 2)
    c.stop(0, 0)
    c.draft(0, 1, 2)
    s = c.snapshot()
    assert s.drafted.sum() == 0
    assert (s.stopped[0], s.stopped_reached[0], s.stopped_hit[0]) == (1, 1, 1)


def test_a_draft_cut_before_its_stop_was_ended_by_the_cut() -> None:
    c = Collector()
    feed(c, 0, 1, 2, 4, 6)
    c.stop(0, 2)
    c.verify(0, [2], "context")
    c.draft(0, 2, 9)
    s = c.snapshot()
    assert s.stopped.sum() == 0
    assert s.censored[2, 1] == 1


def test_invalid_round_counts_as_nothing_else() -> None:
    c = Collector()
    feed(c, 0, 1, 2, 4)
    c.verify(0, [2, 4])
    c.invalid(0)
    assert c.snapshot() == expected(invalid=1)
    c.draft(0, 1, 2)  # nothing was open
    assert c.snapshot() == expected(invalid=1)


def test_replay_of_a_shortened_draft_after_a_restore() -> None:
    c = Collector()
    feed(c, 10, 1, 2, 4, 6)
    c.verify(0, [2, 4, 6])
    # the target took 2, then 5; the engine restored its checkpoint and decoded [1, 2, 5] again
    c.verify(0, [2, 5])
    c.draft(0, 13, 20)  # both were accepted again, 20 is what followed
    s = c.snapshot()
    assert counts(s) == {"drafted": [1, 1, 1, 0], "reached": [1, 1, 0, 0], "accepted": [1, 0, 0, 0]}
    assert s.rank[1].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert s.miss.sum() == 0


def test_replay_of_the_accepted_tokens_alone() -> None:
    c = Collector()
    feed(c, 10, 1, 2, 4, 6)
    c.verify(0, [2, 4, 6])
    c.verify(0, [2])
    c.draft(0, 12, 5)
    s = c.snapshot()
    assert counts(s, 3) == {"drafted": [1, 1, 1], "reached": [1, 1, 0], "accepted": [1, 0, 0]}


def test_replay_that_does_not_fit_is_discarded() -> None:
    c = Collector()
    feed(c, 10, 1, 2, 4, 6)
    c.verify(0, [2, 4, 6])
    c.verify(0, [2, 5])
    c.draft(0, 12, 20)
    assert c.snapshot() == expected(discarded=1)


def test_begin_with_an_open_draft() -> None:
    c = Collector()
    feed(c, 0, 1, 2)
    c.begin(0)
    assert c.snapshot() == expected(unresolved=1)


# ---- sequences


def test_interleaved_sequences_do_not_mix() -> None:
    c = Collector()
    feed(c, 0, 1, 2, seq=3)
    feed(c, 0, 1, 2, seq=2**31 - 1)
    c.draft(3, 2, 9)
    c.draft(2**31 - 1, 1, 3)
    assert c.snapshot(3).accepted[0] == 1
    assert c.snapshot(2**31 - 1).accepted[0] == 0
    assert c.snapshot(2**31 - 1).rank[0, 1] == 1
    assert c.snapshot() == c.snapshot(3) + c.snapshot(2**31 - 1)
    assert c.snapshot(77) == Snapshot()
    assert c.sequences() == [3, 2**31 - 1]


def test_many_sequences() -> None:
    c = Collector()
    ids = [i * 4096 for i in range(300)]
    for seq in ids:
        feed(c, 0, 1, 2, seq=seq)
    for i, seq in enumerate(ids):
        c.draft(seq, 1 + i % 2, 3)
    assert c.sequences() == ids
    assert [int(c.snapshot(seq).accepted[0]) for seq in ids] == [i % 2 for i in range(300)]


def test_take_zeroes_the_counters_and_keeps_the_open_draft() -> None:
    c = Collector()
    feed(c, 0, 1, 2)
    feed(c, 2, 9, 2)
    feed(c, 0, 1, 2, seq=1)
    c.draft(1, 1, 3)
    first = c.take(0)
    assert first.verifications == 1
    assert c.snapshot(0) == Snapshot()
    assert c.snapshot().verifications == 1
    c.draft(0, 4, 9)
    assert c.snapshot(0).accepted[0] == 1
    assert c.take().verifications == 2
    assert c.snapshot() == Snapshot()


def test_reset_forgets_everything() -> None:
    c = Collector()
    feed(c, 0, 1, 2)
    feed(c, 2, 9, 2)
    c.reset()
    c.draft(0, 4, 9)
    assert c.snapshot() == Snapshot()
    assert c.sequences() == [0]


def test_a_snapshot_is_a_copy() -> None:
    c = Collector()
    feed(c, 0, 1, 2)
    c.draft(0, 2, 9)
    s = c.snapshot()
    before = s.to_dict()
    c.candidates(0, 0, row(2))
    c.draft(0, 3, 9)
    assert s.to_dict() == before


# ---- the ways to give a row


def test_three_ways_to_give_candidates_are_one() -> None:
    logits = row(3, 9)
    logits[29] = 50
    logits[1] = np.nan
    snapshots = []
    for way in range(3):
        c = Collector()
        c.draft(0, 0, 1)
        if way == 0:
            c.candidates(0, 0, logits, 28)
        elif way == 1:
            c.candidates_at(0, 0, logits.ctypes.data, VOCAB, 28)
        else:
            read = _core.Row()
            read.read(logits, 28)
            c.candidates_row(0, 0, read)
        c.draft(0, 1, 9)
        snapshots.append(c.snapshot())
    assert snapshots[0] == snapshots[1] == snapshots[2]
    assert snapshots[0].rank[0, 1] == snapshots[0].padded_rows == snapshots[0].nan_rows == 1


def test_the_row_is_used_at_once() -> None:
    # CASES 12: engines overwrite their buffer at the next decode
    c = Collector()
    c.draft(0, 0, 1)
    buffer = row(3, 9)
    c.candidates(0, 0, buffer)
    buffer[:] = row(7, 8)
    c.candidates(0, 1, buffer)
    buffer[:] = 0
    c.draft(0, 2, 8)
    assert c.snapshot().rank[:2].tolist() == [[1] + [0] * 7, [0, 1] + [0] * 6]


# ---- calls out of order


def refused(c: Collector, call: str, *args: object, match: str) -> None:
    """The call raises, and the collector goes on as if it had not been made."""
    before = c.snapshot()
    with pytest.raises(InputError, match=match):
        getattr(c, call)(*args)
    assert c.snapshot() == before


def test_calls_out_of_order_are_refused_and_change_nothing() -> None:
    c = Collector(n_max=3)
    logits = row(2, 3)
    for call, args in {
        "candidates": (0, 0, logits),
        "candidates_at": (0, 0, logits.ctypes.data, VOCAB),
        "stop": (0, 0),
        "verify": (0, [2]),
        "drop": (0,),
        "invalid": (0,),
    }.items():
        refused(c, call, *args, match="no draft")
    c.draft(0, 0, 1)
    refused(c, "candidates", 0, 1, logits, match="position 0, not 1")
    refused(c, "candidates", 0, -1, logits, match="not -1")
    refused(c, "candidates", 0, 0, logits.astype(float), match="float32")
    refused(c, "candidates", 0, 0, logits, 31, match="31 is more")
    refused(c, "candidates", 0, 0, logits, -1, match="-1")
    refused(c, "stop", 0, 0, match="not the last")
    c.candidates(0, 0, logits)
    refused(c, "candidates", 0, 0, logits, match="position 1, not 0")
    refused(c, "stop", 0, 1, match="not the last")
    c.candidates(0, 1, logits)
    c.candidates(0, 2, logits)
    refused(c, "candidates", 0, 3, logits, match="beyond a draft of 3")
    refused(c, "verify", 0, [2, 2, 2, 2], match="4 tokens sent")
    refused(c, "verify", 0, [2, -1, 2], match="padding")
    refused(c, "verify", 0, [-2], match="no token")
    refused(c, "verify", 0, [2**31], match="no token")
    refused(c, "verify", 0, [2] * 1025, match="1024")
    refused(c, "verify", 0, [2], "boredom", match="boredom")
    refused(c, "finish", 0, 5, match="both")
    refused(c, "finish", 0, -5, 2, match="-5")
    refused(c, "draft", 0, -1, 2, match="-1")
    refused(c, "draft", -1, 0, 2, match="-1")
    refused(c, "snapshot", -1, match="-1")
    c.verify(0, [2, 2])
    refused(c, "stop", 0, 2, match="closed")
    refused(c, "drop", 0, match="closed")
    refused(c, "candidates", 0, 3, logits, match="closed")
    c.draft(0, 2, 3)
    s = c.snapshot()
    assert (s.verifications, s.cut_tokens) == (1, 1)
    assert s.rank[:2].tolist() == [[1] + [0] * 7, [0, 1] + [0] * 6]


def test_bad_constructor_arguments() -> None:
    for n_max in (0, -1, 1025):
        with pytest.raises(InputError, match="n_max"):
            Collector(n_max)
    with pytest.raises(InputError, match="every"):
        Collector(every=-1)


def test_a_row_read_without_softmax_is_refused() -> None:
    c = Collector()
    logits = row(2)
    quick = _core.Row()
    quick.best_at(logits.ctypes.data, VOCAB)
    c.draft(0, 0, 1)
    refused(c, "candidates_row", 0, 0, quick, match="read_at")


def test_iterating_tokens_may_reset_the_collector() -> None:
    c = Collector()
    feed(c, 0, 1, 2)

    def tokens() -> Any:
        c.reset()
        yield 2

    with pytest.raises(InputError, match="no draft"):
        c.verify(0, tokens())


# ---- reports and switches


def test_sink_is_called_every_so_many_verifications() -> None:
    seen: list[Snapshot] = []
    c = Collector(every=3, sink=seen.append)
    for i in range(8):
        feed(c, 2 * i, 1, 2, seq=i % 2)
    c.finish(0, 14, 9)
    # sequence 0 starts anew each time two positions late, so its drafts resolve as rewinds;
    # count what the collector itself says instead of guessing
    assert [s.verifications for s in seen] == list(range(3, c.snapshot().verifications + 1, 3))


def test_what_a_sink_raises_reaches_the_caller_after_the_draft_is_open() -> None:
    def sink(_: Snapshot) -> None:
        raise RuntimeError("full disk")

    c = Collector(every=1, sink=sink)
    feed(c, 0, 1, 2)
    with pytest.raises(RuntimeError, match="full disk"):
        c.draft(0, 2, 9)
    c.candidates(0, 0, row(2))
    assert c.snapshot().verifications == 1


def test_from_env_is_on_only_for_1() -> None:
    for value in (None, "", "0", "true", "yes", " 1", "2"):
        env = {} if value is None else {"LLAMA_MTP_TOPK_STATS": value}
        assert not Collector.from_env(env).enabled
    c = Collector.from_env({"LLAMA_MTP_TOPK_STATS": "1"})
    assert c.enabled
    assert c.every == 128


@pytest.mark.parametrize("value", ["0", "-3", "often", "", "1.5", str(2**63)])
def test_from_env_refuses_a_bad_interval(value: str) -> None:
    env = {"LLAMA_MTP_TOPK_STATS": "1", "LLAMA_MTP_TOPK_STATS_EVERY": value}
    with pytest.raises(InputError, match="LLAMA_MTP_TOPK_STATS_EVERY"):
        Collector.from_env(env)
    env["LLAMA_MTP_TOPK_STATS"] = "0"
    assert not Collector.from_env(env).enabled


def test_from_env_reports_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_MTP_TOPK_STATS", "1")
    monkeypatch.setenv("LLAMA_MTP_TOPK_STATS_EVERY", "2")
    c = Collector.from_env()
    twin = Collector()
    for i in range(4):
        feed(c, 2 * i, 1, 2)
        if i < 3:
            feed(twin, 2 * i, 1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == compact(twin.snapshot()) + "\n"
    assert "2 verifications, 2 drafted, 2 accepted" in err


def test_compact_table_fits_80_columns_whatever_the_counts() -> None:
    s = Snapshot()
    for name in ("drafted", "reached", "accepted", "miss"):
        getattr(s, name)[:] = 2**63
    s.rank[:] = 2**63
    s.verifications = 2**64 - 1
    lines = compact(s).splitlines()
    assert len(lines) == 18
    assert max(map(len, lines)) <= 80
    assert compact(Snapshot()).count("\n") == 1


# ---- off


def test_off_collects_nothing_and_checks_nothing() -> None:
    c = Collector(enabled=False)
    c.begin(-5)
    c.draft(0, -1, 2)
    c.candidates(0, 7, "no row", -3)
    c.candidates_at(0, 7, 0, -1)
    c.stop(0, 9)
    c.verify(0, None, "boredom")
    c.drop(0)
    c.invalid(0)
    c.finish(0, 3)
    assert not c.enabled
    assert c.snapshot() == c.take() == Snapshot()
    assert c.sequences() == []


def test_off_allocates_nothing_that_python_sees() -> None:
    c = Collector(enabled=False)
    logits = row(2)
    address = logits.ctypes.data
    position, n_past, token, n = 3, 100_000, 90_000, VOCAB
    loop = range(1000)
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        blocks = sys.getallocatedblocks()
        peak_before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in loop:
            c.draft(0, n_past, token)
            c.candidates(0, position, logits)
            c.candidates_at(0, position, address, n)
        peak = tracemalloc.get_traced_memory()[1]
        blocks = sys.getallocatedblocks() - blocks
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    here = [d for d in after.compare_to(before, "filename") if "_core" in d.traceback[0].filename]
    assert here == []
    # a block a call would be 3,000; what is left is this test's own bookkeeping
    assert blocks < 100
    assert peak - peak_before < 20_000


SHIM = r"""
#include <stddef.h>
#include <dlfcn.h>
#include <stdatomic.h>
static atomic_long calls;
static void *(*next_malloc)(size_t), *(*next_calloc)(size_t, size_t);
static void *(*next_realloc)(void *, size_t);
static char early[4096]; static size_t used;
long count_allocations(void) { return atomic_load(&calls); }
void *malloc(size_t n) {
    if (!next_malloc) next_malloc = dlsym(RTLD_NEXT, "malloc");
    atomic_fetch_add(&calls, 1); return next_malloc(n);
}
void *calloc(size_t m, size_t n) { /* dlsym itself calls it */
    if (!next_calloc) {
        static int looking;
        if (looking) { void *p = early + used; used += (m * n + 15) & ~(size_t)15; return p; }
        looking = 1; next_calloc = dlsym(RTLD_NEXT, "calloc");
    }
    atomic_fetch_add(&calls, 1); return next_calloc(m, n);
}
void *realloc(void *p, size_t n) {
    if (!next_realloc) next_realloc = dlsym(RTLD_NEXT, "realloc");
    atomic_fetch_add(&calls, 1); return next_realloc(p, n);
}
"""

COUNT = """
import ctypes, numpy as np
from itertools import repeat
from mtpstats.stats import Collector
calls = ctypes.CDLL(None).count_allocations
calls.restype = ctypes.c_long
off = Collector(enabled=False)
on = Collector()
logits = np.zeros(100, np.float32)
address, n_past, token = logits.ctypes.data, 100_000, 90_000
def run(c, times):
    for _ in repeat(None, times):
        c.draft(0, n_past, token)
        c.candidates_at(0, 0, address, 100)
def run_buffer(c, times):
    for _ in repeat(None, times):
        c.draft(0, n_past, token)
        c.candidates(0, 0, logits)
run(off, 10); run(on, 10); run_buffer(off, 10)
a = calls(); run(off, 5000); run_buffer(off, 5000)
b = calls(); run(on, 5000)
c = calls(); Collector(enabled=False); Collector(enabled=False)
d = calls()
for _ in repeat(None, 20):
    Collector()
e = calls()
print(b - a, c - b, d - c, e - d)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the counting shim needs LD_PRELOAD")
def test_the_c_allocator_is_not_called(tmp_path: Any) -> None:
    """Counts malloc, calloc and realloc: with PYTHONMALLOC=malloc Python's own calls too."""
    source, shim = tmp_path / "count.c", tmp_path / "count.so"
    source.write_text(SHIM)
    cc = os.environ.get("CC", "cc")
    subprocess.run(
        [*cc.split(), "-O1", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True
    )
    env = os.environ | {"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc"}
    found = subprocess.run(
        [sys.executable, "-c", COUNT], env=env, check=True, capture_output=True, text=True
    )
    off, on, construct_off, construct_on = map(int, found.stdout.split())
    # the test itself makes a few objects; a call that allocated would count 20,000
    assert off < 20
    assert on < 20  # collecting from an address allocates nothing either
    assert construct_off <= 4  # two objects, and what makes the calls
    assert construct_on >= 40  # two tables each: the shim does count


def test_memory_is_constant_in_the_length_of_the_run_and_under_64_kb() -> None:
    assert _core.STATE_BYTES < 64 * 1024
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("no mallinfo2 in this C library")

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "abcdefg"] + [
            ("uordblks", ctypes.c_size_t), ("h", ctypes.c_size_t), ("i", ctypes.c_size_t)
        ]  # fmt: skip

    libc.mallinfo2.restype = Info
    c = Collector()
    logits = row(2)

    def run(n: int) -> None:
        for i in range(n):
            c.draft(0, i, 2)
            c.candidates(0, 0, logits)
            c.candidates(0, 1, logits)
            c.verify(0, (2, 2))

    run(100)
    before = libc.mallinfo2().uordblks
    run(20_000)
    assert abs(libc.mallinfo2().uordblks - before) < 4096


# ---- against the reference


def pool() -> list[tuple[list[float], int | None]]:
    """Rows (and vocabulary sizes) with ties, NaN, infinities, padding, few tokens."""
    rng = np.random.default_rng(11)
    rows: list[tuple[list[float], int | None]] = [
        ([math.nan, math.inf, -math.inf], None),
        ([1.0, 1.0, 1.0, 9.0], 3),
        ([5.0], None),
    ]
    for n in (2, 3, 7, 8, 9, 10, 11, 14, 14, 14, 14, 14, 14):
        row = np.round(rng.normal(0, 2, n), 1).astype(np.float32)
        row[rng.integers(0, n)] = rng.choice([np.nan, np.inf, -np.inf, 0, 0, 0, 4])
        rows.append((row.tolist(), None if rng.random() < 0.7 else int(rng.integers(1, n + 1))))
    return rows


POOL = pool()


class Script:
    """Decisions read off a list of numbers, which Hypothesis shortens and lowers."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def pick(self, *choices: Any) -> Any:
        return choices[self.numbers.pop() % len(choices)] if self.numbers else choices[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=250))
def test_collector_equals_the_reference(numbers: list[int]) -> None:
    script = Script(numbers)
    c = Collector()
    references = {seq: reference.Collector() for seq in (0, 5, 70_000)}
    while script.numbers:
        seq = script.pick(0, 5, 70_000)
        r = references[seq]
        n_past = 0 if r.open is None else r.open.n_past
        n_past = max(0, n_past + script.pick(1, 2, 3, 1, 2, 3, 4, 5, 6, 0, -1, 19, 18))
        id_last = script.pick(*range(14))
        how = script.pick(*["draft"] * 12, "begin", "finish", "end", "invalid")
        if how == "begin":
            c.begin(seq)
            r.begin()
        elif how == "finish":
            c.finish(seq)
            r.finish(None, None)
        elif how == "end":
            c.finish(seq, n_past, id_last)
            r.finish(n_past, id_last)
        elif how == "invalid" and r.open is not None:
            c.invalid(seq)
            r.invalid()
        elif how == "draft":
            c.draft(seq, n_past, id_last)
            r.draft(n_past, id_last)
            _one_draft(script, c, r, seq)
    for seq, r in references.items():
        check_same(c.snapshot(seq), r.counts)
    assert c.snapshot() == Snapshot.merge(*(c.snapshot(seq) for seq in references))


def _one_draft(script: Script, c: Collector, r: reference.Collector, seq: int) -> None:
    length = script.pick(3, 2, 1, 0, 4, 5, 18)
    for i in range(length):
        logits, n_vocab = POOL[-1] if i > 5 else script.pick(*reversed(POOL))
        c.candidates(seq, i, np.array(logits, np.float32), n_vocab)
        r.candidates(logits, n_vocab)
    if length and script.pick(False, False, True):
        c.stop(seq, length - 1)
        r.stop()
    then = script.pick("nothing", "verify", "verify", "drop", "replay")
    planned = r._planned()
    if then == "drop":
        c.drop(seq)
        r.drop()
    elif then != "nothing":
        for _ in range(2 if then == "replay" else 1):
            cut = script.pick(0, 0, 0, 1, 2)
            tokens = [script.pick(*range(14)) for _ in range(planned - cut)]
            reason = script.pick(*reference.REASONS)
            c.verify(seq, tokens, reason)
            r.verify(tokens, reason)


def check_same(s: Snapshot, counts: dict[str, Any]) -> None:
    """Equal counters; a sum of probabilities may differ by one unit a term, where the kernel's
    1e-7 falls on the other side of a rounding, and so may a decile."""
    exact = {k: v for k, v in s.to_dict().items() if not k.startswith(("sum_", "calib_"))}
    assert exact == {k: counts[k] for k in exact}
    for name in ("sum_p", "sum_p_top10"):
        ours = getattr(s, f"{name}_units").astype(np.int64)
        terms = s.reached[:, None].astype(np.int64)
        assert (np.abs(ours - np.array(counts[name])) <= 8 * terms).all()
    for name in ("calib_p1", "calib_p2"):
        moved = np.abs(getattr(s, name).astype(np.int64) - np.array(counts[name])).sum(axis=1)
        assert (moved <= 2).all()
        assert moved.sum() % 2 == 0


# ---- trees


def tree_round(collector: Collector, rows: list[list[float]], *told: Any) -> None:
    for i, row in enumerate(rows):
        collector.candidates(0, i, np.float32(row))
    collector.verify_tree(0, *told)


def test_a_tree_counts_its_depth_and_the_path_that_was_accepted() -> None:
    collector = Collector()
    # Best to worst token 3, 2, 1, 0; then 0, 1, 2, 3.
    down, up = [0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]
    collector.draft(0, 10, 7)
    # 2 (rank 2), then 0 (rank 1), where the tree has a leaf; it is 3 deep elsewhere.
    tree_round(collector, [down, up], [2, 0], 3, True)
    collector.draft(0, 13, 5)
    # 3 (rank 1), then none of its children: the target chose 1 (rank 2).
    tree_round(collector, [down, up], [3], 3, False)
    collector.draft(0, 15, 1)
    # All of a tree that the budget cut to depth 1.
    tree_round(collector, [down], [3], 1, True, "budget")
    collector.draft(0, 17, 2)
    found = collector.snapshot()
    assert found.verifications == 3
    assert found.drafted[:4].tolist() == [3, 2, 2, 0]
    assert found.reached[:3].tolist() == [3, 2, 0]
    assert found.accepted[:3].tolist() == [3, 1, 0]
    assert found.rank[0, :4].tolist() == [2, 1, 0, 0]
    assert found.rank[1, :4].tolist() == [1, 1, 0, 0]
    assert found.miss.sum() == 0
    assert found.censored[:, :3].tolist() == [[0, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert found.cut_tokens == 0


def test_a_generation_that_ends_on_a_path() -> None:
    collector = Collector()
    down = [0.0, 1.0, 2.0, 3.0]
    collector.draft(0, 10, 7)
    # The second token ended it, though the tree went on below.
    tree_round(collector, [down, down], [3, 2], 4, True)
    collector.finish(0, 12, 2)
    found = collector.snapshot()
    assert (found.verifications, found.discarded) == (1, 0)
    assert found.drafted[:4].tolist() == found.accepted[:4].tolist() == [1, 1, 0, 0]
    assert found.rank[1, :2].tolist() == [0, 1]
    assert found.censored[:, 2].tolist() == [0, 0, 0, 1]


def test_p_min_is_judged_by_the_chain_alone() -> None:
    """A sibling in the place of the chain's last token says nothing about what came after it."""
    down = [0.0, 1.0, 2.0, 3.0]
    for token, reached in ((3, 1), (2, 0)):
        collector = Collector()
        collector.draft(0, 10, 7)
        for i in range(2):
            collector.candidates(0, i, np.float32(down))
        collector.stop(0, 1)
        collector.verify_tree(0, [token], 1, True)
        collector.draft(0, 12, 3)
        found = collector.snapshot()
        assert found.stopped[1] == 1
        assert found.stopped_reached[1] == found.stopped_hit[1] == reached
        assert found.accepted[0] == 1


def test_trees_that_cannot_be() -> None:
    down = [0.0, 1.0, 2.0, 3.0]
    collector = Collector()
    collector.draft(0, 10, 7)
    collector.candidates(0, 0, np.float32(down))
    with pytest.raises(InputError, match="2 tokens of a tree that is 1 deep"):
        collector.verify_tree(0, [1, 2], 1, True)
    with pytest.raises(InputError, match="candidates were given for 1 positions"):
        collector.verify_tree(0, [1], 2, False)
    collector.verify_tree(0, [1], 2, True)
    with pytest.raises(InputError, match="already closed"):
        collector.verify_tree(0, [1], 2, True)
    # Another number of tokens than was accepted.
    collector.draft(0, 11, 0)
    assert (collector.snapshot().verifications, collector.snapshot().discarded) == (0, 1)
    Collector(enabled=False).verify_tree(0, [1], 1, True)
