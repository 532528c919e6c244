"""What a loop tells a collector of the draft, sequences, and the ways to give a row."""

from __future__ import annotations

import numpy as np
from drafts import VOCAB, counts, expected, feed, row

from mtpstats import _core
from mtpstats.stats import Collector, Snapshot

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
