"""Near ties by hand: from which verification on a run may differ from its replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from made import P, by_chance, text, trace

from mtpstats.policy import Chain, GatedSiblings, Tree
from mtpstats.replay import replay


def test_a_near_tie_of_the_target_marks_the_verification_that_chose_there():
    def marked(at):
        margin = np.ones(8)
        margin[at] = 0.009
        return replay(text(margin=margin), Chain(2)).prompts[0].near_tie

    # the three verifications choose tokens 0-2, 3-4 and 5-7
    assert [marked(at) for at in range(8)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert replay(text(margin=np.full(8, 0.011)), Chain(2)).prompts[0].near_tie is None


def test_a_near_tie_of_the_head_matters_where_its_order_does():
    def marked(r, d, policy):
        p = np.tile(np.float32(P), (8, 3, 1))
        p[r, d, :3] = 0.4, 0.398, 0.2
        return replay(text(p=p), policy).prompts[0].near_tie

    assert marked(0, 0, Chain(2)) == 0  # accepted, and the second is as likely
    assert marked(3, 0, Chain(2)) == 1
    assert marked(3, 1, Chain(2)) is None  # neither of the two was right
    assert marked(0, 2, Chain(2)) is None  # not drafted
    assert marked(1, 0, Chain(2)) is None  # no start
    assert marked(2, 0, Tree([(1,), (2,), (2, 1)])) == 1


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


def test_a_probability_close_to_p_min():
    shares = np.full((8, 3), 0.9)
    shares[3, 1] = 0.5004
    assert replay(text(p_min_p=shares), Chain(2, p_min=0.5)).prompts[0].near_tie == 1
    assert replay(text(p_min_p=shares), Chain(2, p_min=0.4)).prompts[0].near_tie is None
    assert replay(text(p_min_p=shares), Chain(1, p_min=0.5)).prompts[0].near_tie is None
