"""Near ties by hand: from which verification on a run may differ from its replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made import P, by_chance, prompt, text, trace

from mtpstats.policy import Chain, GatedSiblings, Tree
from mtpstats.replay import replay


def test_a_near_tie_of_the_target_marks_the_verification_that_chose_there():
    def marked(at, policy):
        margin = np.ones(8)
        margin[at] = 0.009
        return replay(text(margin=margin), policy).prompts[0].near_tie

    # the three verifications choose tokens 0-2, 3-4 and 5-7
    assert [marked(at, Chain(2)) for at in range(8)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert replay(text(margin=np.full(8, 0.011)), Chain(2)).prompts[0].near_tie is None
    # of two, the first
    assert marked([0, 7], Chain(2)) == marked([0, 7], Tree.chain(2)) == 0


def test_what_follows_a_text_s_margins_is_no_near_tie():
    margin = np.ones(9, np.float32)
    margin[8] = 0  # of root 5's three accepted tokens and the one after, the last is not known
    recording = text(margin=margin[:8])
    assert replay(recording, Chain(3), starts="uniform").prompts[0].near_tie is None


def marked(r, d, policy, *, n_predict=None, **changes):
    """The first near tie if the head's first and second choice are as likely at one place."""
    p = np.tile(np.float32(P), (8, 3, 1))
    p[r, d, :3] = 0.4, 0.398, 0.2
    return replay(text(p=p, **changes), policy, n_predict=n_predict).prompts[0].near_tie


def test_a_near_tie_of_the_head_matters_where_its_order_does():
    assert marked(0, 0, Chain(2)) == 0  # accepted, and the second is as likely
    assert marked(3, 0, Chain(2)) == 1
    assert marked(3, 1, Chain(2)) is None  # neither of the two was right
    assert marked(0, 2, Chain(2)) is None  # not drafted
    assert marked(1, 0, Chain(2)) is None  # no start
    assert marked(2, 0, Chain(1)) == 1  # missed, and the second was right
    # cut after two; the third, of which the second choice was right, was not sent
    assert marked(0, 2, Chain(3, n_min=3)) == 0
    assert marked(0, 2, Chain(3, n_min=3), n_predict=3) is None
    assert marked(2, 0, Tree([(1,), (2,), (2, 1)])) == 1
    assert marked(2, 0, Tree([(1,)])) == 1  # the second was right, and almost the first
    assert marked(0, 0, Tree([(1,)])) == 0  # the other way round


def test_where_more_than_the_target_s_choice_hangs_on_the_head_s_order():
    # Root 3's second token, neither choice of which was right: its probability decides too.
    assert marked(3, 1, Chain(2)) is None
    assert marked(3, 1, Chain(2, p_min=0.1)) == 1
    assert marked(3, 1, GatedSiblings(2, p1_max=0.0, p2_min=0.9, p3_min=0.9)) == 1
    # Root 0 is stopped at its second token, and nothing comes of what stands there.
    shares = np.full((8, 3), 0.9)
    shares[0, 1] = 0.4
    assert marked(0, 1, Chain(3, p_min=0.5), p_min_p=shares) is None


def test_the_last_candidate_has_none_after_it():
    assert replay(trace(prompt([[8], [0]], 1)), Tree([(8,)])).prompts[0].near_tie is None


def test_near_ties_of_uniform_starts_are_at_their_own_tokens():
    whole = by_chance(1, every=2)
    margin = np.ones(len(whole.margin), np.float32)
    margin[4] = 0.001
    p = np.tile(np.float32(P), (*whole.rank.shape, 1))
    recording = trace(replace(whole, margin=margin, p=p), every=2)
    # root 2 is at the fifth generated token
    assert replay(recording, Chain(1), starts="uniform").prompts[0].near_tie == 2


def test_siblings_that_could_change_places():
    p = np.tile(np.float32(P), (8, 3, 1))
    p[0, 0, :3] = 0.5, 0.3, 0.2995
    gated = GatedSiblings(1, p1_max=0.6, p2_min=0.1)
    assert replay(text(p=p), gated).prompts[0].near_tie == 0
    assert replay(text(p=p), Chain(1)).prompts[0].near_tie is None
    assert replay(text(), gated).prompts[0].near_tie is None


@pytest.mark.parametrize(
    ("best", "tie"),
    [
        ((0.5, 0.4, 0.2), None),
        ((0.6004, 0.4, 0.2), 0),
        ((0.5996, 0.4, 0.2), 0),
        ((0.6006, 0.4, 0.2), None),
        ((0.5, 0.3004, 0.2), 0),
        ((0.5, 0.4, 0.1004), 0),
    ],
)
def test_a_probability_close_to_a_gate(best, tie):
    p = np.tile(np.float32(P), (8, 3, 1))
    p[0, 2, :3] = best
    gated = GatedSiblings(3, n_min=3, p1_max=0.6, p2_min=0.3, p3_min=0.1)
    assert replay(text(p=p), gated).prompts[0].near_tie == tie
    # not sent to the target
    assert replay(text(p=p), gated, n_predict=3).prompts[0].near_tie is None


def test_a_probability_close_to_p_min():
    shares = np.full((8, 3), 0.9)
    shares[3, 1] = 0.5004
    assert replay(text(p_min_p=shares), Chain(2, p_min=0.5)).prompts[0].near_tie == 1
    assert replay(text(p_min_p=shares), Chain(2, p_min=0.4)).prompts[0].near_tie is None
    assert replay(text(p_min_p=shares), Chain(1, p_min=0.5)).prompts[0].near_tie is None
