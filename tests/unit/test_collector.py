"""The collector: what two calls say of a draft, and every edge rule by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
from drafts import VOCAB, counts, expected, feed, row

from mtpstats.errors import InputError
from mtpstats.stats import Collector, Snapshot

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
