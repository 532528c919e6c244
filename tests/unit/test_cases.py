"""Faults that users of speculative decoding met in other engines."""

from __future__ import annotations

import numpy as np
import pytest

from mtpstats.stats import Collector, Snapshot
from mtpstats.summary import Summary, expected_length, summarise


def played(*rounds: tuple[int, int]) -> Collector:
    """A collector that saw rounds of (drafted, accepted), each with a bonus or corrected token."""
    c = Collector()
    best = np.arange(10, 0, -1).astype(np.float32)  # token 0 first, then 1, 2, ...
    n_past = 100
    for drafted, accepted in rounds:
        c.draft(0, n_past, 5)
        for i in range(drafted):
            c.candidates(0, i, best)
        c.verify(0, [0] * drafted)
        n_past += accepted + 1
        c.finish(0, n_past, 3)
    return c


def summary(*rounds: tuple[int, int]) -> Summary:
    return summarise(played(*rounds).snapshot())


def test_case_1_all_accepted_with_bonus() -> None:
    found = summary((3, 3))
    assert found.acceptance is not None
    assert found.acceptance_length is not None
    assert found.acceptance.value == 1.0
    assert found.acceptance.hi <= 1.0
    assert found.acceptance_length.value == 4
    assert all(p.acceptance is not None and p.acceptance.value == 1 for p in found.positions)


def test_case_2_none_accepted() -> None:
    found = summary((3, 0))
    assert found.acceptance is not None
    assert found.acceptance.value == 0.0
    assert found.positions[1].acceptance is None  # never reached


def test_case_3_bonus_token_is_in_the_length() -> None:
    found = summary((3, 0), (3, 2))
    assert found.acceptance_length is not None
    assert found.acceptance_length.value == 2.0


def test_case_4_padding_is_not_drafted() -> None:
    c = Collector()
    c.draft(0, 0, 1)
    for i in range(3):
        c.candidates(0, i, np.arange(8, dtype=np.float32))
    c.verify(0, [5, -1, -1])
    c.draft(0, 1, 4)
    assert c.snapshot().tokens_drafted == 1


def test_case_5_drafts_of_unlike_length() -> None:
    assert summary((3, 1), (1, 0)).drafted == 4


def test_case_6_thrown_away_for_n_min() -> None:
    c = Collector()
    c.draft(0, 0, 1)
    for i in range(2):
        c.candidates(0, i, np.arange(8, dtype=np.float32))
    c.drop(0)
    c.draft(0, 1, 7)
    s = c.snapshot()
    assert (s.tokens_drafted, int(s.reached[0]), int(s.miss.sum() + s.rank.sum())) == (0, 0, 0)
    assert (s.verifications, s.dropped_drafts, s.dropped_tokens) == (1, 1, 2)
    assert summarise(s).acceptance is None


def test_case_7_cut_by_the_context() -> None:
    c = Collector()
    c.draft(0, 0, 1)
    for i in range(5):
        c.candidates(0, i, np.array([1, 0], np.float32))
    c.verify(0, [0, 0, 0], "context")
    c.finish(0, 4, 1)
    s = c.snapshot()
    assert s.reached.tolist()[:5] == [1, 1, 1, 0, 0]
    assert s.accepted.tolist()[:5] == [1, 1, 1, 0, 0]
    assert s.censored[2, 3] == 1  # context, length 3
    assert s.censored.sum() == 1


def test_case_8_no_drafts_in_a_run() -> None:
    c = Collector()
    for i in range(5):
        c.draft(0, i, 1)
    c.finish(0)
    found = summarise(c.snapshot(), tokens=5)
    assert c.snapshot().verifications == 4
    assert found.acceptance is None
    assert found.positions == ()
    assert found.expected_length is None
    assert summarise(Snapshot()).acceptance_length is None


def test_case_10_expected_tokens_a_round() -> None:
    # 1 + .728 + .728 ** 2 + .728 ** 3, which is 2.644
    by_hand = 1 + 0.728 + 0.529984 + 0.385828352
    assert expected_length([0.728] * 3) == pytest.approx(by_hand, rel=1e-12)


def test_case_11_unconditional_and_conditional_rates() -> None:
    # 87 drafts of 3: 70, 55 and 42 accepted at positions 1, 2, 3
    lengths = [3] * 42 + [2] * (55 - 42) + [1] * (70 - 55) + [0] * (87 - 70)
    found = summary(*((3, n) for n in lengths))
    assert found.accepted == 167
    unconditional = [p.unconditional.value for p in found.positions if p.unconditional]
    conditional = [p.acceptance.value for p in found.positions if p.acceptance]
    assert unconditional == pytest.approx([0.805, 0.632, 0.483], abs=5e-4)
    # .764 is 42 / 55: the third position is reached 55 times
    assert conditional == pytest.approx([0.805, 0.785, 0.764], abs=1e-3)


def test_case_14_nan_in_the_head_or_in_the_target() -> None:
    c = Collector()
    c.draft(0, 0, 1)
    c.candidates(0, 0, np.full(8, np.nan, np.float32))
    c.draft(0, 1, 2)
    c.candidates(0, 0, np.arange(8, dtype=np.float32))
    c.invalid(0)
    s = c.snapshot()
    assert (s.invalid, s.verifications) == (2, 0)
    assert s.rank.sum() == s.miss.sum() == s.reached.sum() == 0
    assert summarise(s).acceptance is None


def test_case_17_coverage_beside_acceptance() -> None:
    # 18 of 19 drafted tokens accepted, in one draft each; 101 tokens generated
    rounds = [(1, 1)] * 18 + [(1, 0)] + [(0, 0)] * (101 - 37)
    s = played(*rounds).snapshot()
    found = summarise(s)
    assert found.tokens == 101
    assert found.coverage is not None
    assert found.acceptance is not None
    assert found.coverage.value == pytest.approx(0.19, abs=0.005)
    assert found.acceptance.value == pytest.approx(0.95, abs=0.005)


def test_case_20_broken_head() -> None:
    found = summary(*[(1, 1)], *[(1, 0)] * 632)
    assert any("broken, not weak" in w and "1 of 633" in w for w in found.warnings)
