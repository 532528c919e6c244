"""Replay of traces made by hand, every value worked out on paper."""

from __future__ import annotations

import numpy as np
import pytest
from made import RANKS, TOP10, P, by_chance, lists, prompt, text, trace

from mtpstats.errors import InputError
from mtpstats.policy import AdaptiveDepth, Chain, GatedSiblings, Tree
from mtpstats.replay import reach, replay, totals


def first(array, n=3):
    return array[:n].tolist()


# ---- chains


def test_chain():
    found = replay(text(), Chain(2))
    # root 0 accepts both and goes on at root 3; there the second is a miss: root 5, both again
    assert lists(found) == [[(2, 2), (2, 1), (2, 2)]]
    assert (found.tokens, found.n_verifications, found.drafted, found.accepted) == (8, 3, 6, 5)
    s = found.snapshot
    assert (first(s.drafted), first(s.reached), first(s.accepted)) == (
        [3, 3, 0], [3, 3, 0], [3, 2, 0],
    )  # fmt: skip
    assert s.rank[0].tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    assert s.rank[1].tolist() == [2, 0, 0, 0, 0, 0, 0, 0]
    assert first(s.miss) == [0, 1, 0]
    assert s.sum_p[1].tolist() == [3 * p for p in P]
    assert s.sum_p_top10[0].tolist() == pytest.approx([3 * p / TOP10 for p in P], abs=1e-6)
    assert s.calib_p1[1, 5].tolist() == [3, 2]  # p1 is 0.5
    assert s.calib_p2[1, 2].tolist() == [3, 0]  # p2 is 0.25
    assert s.censored.tolist()[0][:4] == [0, 0, 2, 0]
    assert s.censored.sum() == 2
    t = found.totals
    assert t.rows.tolist() == [[0, 0, 0, 3]]
    assert t.widths.tolist() == [[0, 6]]
    assert first(t.lengths[0], 4) == [0, 1, 2, 0]
    assert t.length == pytest.approx(8 / 3)
    assert found.prompts[0].stop == "trace"


def test_p_min_stops_and_the_text_ends_inside_a_verification():
    shares = np.full((8, 3), 0.9)
    shares[0, 1] = shares[3, 0] = shares[4, 2] = 0.4
    found = replay(text(p_min_p=shares), Chain(3, p_min=0.5))
    # root 0 stops after one, accepted; the candidate it stopped at was right. Root 2: three,
    # none accepted. Root 3 stops at once, its candidate was right. Root 4 stops after two, none
    # accepted. Root 5 accepts all three, but what the target adds is not in the text.
    assert lists(found) == [[(1, 1), (3, 0), (0, 0), (2, 0)]]
    s = found.snapshot
    assert first(s.stopped) == [1, 1, 1]
    assert first(s.stopped_reached) == [1, 1, 0]
    assert first(s.stopped_hit) == [1, 1, 0]
    assert (s.verifications, s.unresolved, s.censored.sum()) == (4, 1, 0)
    assert (first(s.drafted), first(s.reached)) == ([3, 2, 1], [3, 0, 0])
    assert s.rank[0, :3].tolist() == [1, 1, 0]
    assert first(s.miss) == [1, 0, 0]
    assert found.totals.widths.tolist() == [[0, 2 + 3 + 1 + 3]]
    assert (found.tokens, found.prompts[0].stop) == (5, "trace")


def test_p_min_is_compared_as_the_drafter_does():
    shares = np.full((8, 3), np.float32(0.6))
    # float32(0.6) is a little above 0.6, and only what is below p_min stops
    assert replay(text(p_min_p=shares), Chain(2, p_min=0.6)).drafted == 6
    shares[:] = np.nextafter(np.float32(0.6), np.float32(0))
    assert replay(text(p_min_p=shares), Chain(2, p_min=0.6)).drafted == 0


def test_tokens_run_out():
    found = replay(text(), Chain(3), n_predict=3)
    # of 3 tokens, 2 may be drafted at first; with none left to draft for nothing is cut
    assert lists(found) == [[(2, 2), (3, 1)]]
    assert (found.tokens, found.prompts[0].stop) == (5, "n_predict")
    assert found.snapshot.censored[1, 2] == 1
    assert found.snapshot.censored.sum() == 1


def test_context_runs_out():
    found = replay(text(), Chain(3), n_ctx=6)
    # positions 1, 4 and 5 of 6: room for three drafted tokens, then for none
    assert lists(found) == [[(3, 2), (0, 0), (0, 0)]]
    assert (found.tokens, found.prompts[0].stop) == (5, "context")
    assert found.snapshot.censored[2, 0] == 2
    assert found.totals.widths.tolist() == [[0, 3]]


def test_a_text_cut_off_by_its_context_is_replayed_in_it():
    recording = text(stop="context", n_ctx=9)
    found = replay(recording, Chain(2))
    # root 0 at position 1, root 3 at 4, then at 6: 9 - 6 - 2 leaves one token
    assert lists(found) == [[(2, 2), (2, 1), (1, 1), (0, 0)]]
    assert found.prompts[0].stop == "context"
    # a smaller one counts instead: 6 - 1 - 2 leaves three tokens, 6 - 4 - 2 none
    smaller = replay(recording, Chain(2), n_ctx=6)
    assert (lists(smaller), smaller.prompts[0].stop) == ([[(2, 2), (0, 0), (0, 0)]], "context")
    with pytest.raises(InputError, match="recorded up to the end of a context of 9"):
        replay(recording, Chain(2), n_ctx=10)


def test_the_context_of_a_text_that_it_did_not_end_is_no_limit():
    # root 5 at position 6 of 10 has room for two; but three are drafted, and the text ends
    assert lists(replay(text(n_ctx=10), Chain(3))) == [[(3, 2), (3, 1)]]
    assert lists(replay(text(), Chain(3), n_ctx=10)) == [[(3, 2), (3, 1), (2, 2)]]


def test_short_drafts_are_thrown_away():
    shares = np.full((8, 3), 0.9)
    shares[0, 1] = shares[1, 0] = 0.4
    found = replay(text(p_min_p=shares), Chain(3, p_min=0.5, n_min=2))
    # root 0 drafts one token, too few; root 1 none, too few as well; root 2 three, a miss;
    # root 3 three, one accepted; root 5 runs out of text
    assert lists(found) == [[(0, 0), (0, 0), (3, 0), (3, 1)]]
    s = found.snapshot
    assert (s.dropped_drafts, s.dropped_tokens, s.cut_tokens) == (1, 1, 0)
    assert first(s.stopped) == [1, 0, 0]  # only where nothing at all was drafted
    assert found.totals.widths.tolist() == [[0, 2 + 1 + 3 + 3]]


def test_a_draft_grows_past_the_cut_for_n_min():
    found = replay(text(), Chain(3, n_min=3), n_predict=3)
    assert lists(found) == [[(2, 2), (3, 1)]]
    assert found.snapshot.cut_tokens == 1
    assert found.totals.widths.tolist() == [[0, 6]]


def test_a_draft_grows_a_token_past_the_context_for_n_min():
    # root 0 at position 1 of 5 has room for two, the third is cut; root 3 has none
    found = replay(text(), Chain(3, n_min=3), n_ctx=5)
    assert lists(found) == [[(2, 2), (0, 0)]]
    assert (found.snapshot.cut_tokens, found.snapshot.dropped_drafts) == (1, 0)
    # of 4 there is room for one, and two are too few
    found = replay(text(), Chain(3, n_min=3), n_ctx=4)
    assert lists(found) == [[(0, 0), (0, 0), (0, 0)]]
    assert (found.snapshot.dropped_drafts, found.snapshot.dropped_tokens) == (1, 2)


END = [[1, 1], [1]]  # of 3 tokens, the last one ends the generation


@pytest.mark.parametrize(
    ("n_max", "listed", "drafted", "accepted", "reason", "length"),
    [
        (1, (1, 1), [1, 0, 0], [1, 0, 0], 0, 1),  # the end is the target's own token
        (2, (2, 2), [1, 1, 0], [1, 1, 0], 3, 2),  # the last of the draft: accepted
        (3, (3, 1), [1, 1, 0], [1, 1, 0], 3, 2),  # inside: llama.cpp takes it as the target's own
    ],
)
def test_end_of_generation(n_max, listed, drafted, accepted, reason, length):
    recording = trace(prompt(END, depth=3, stop="eog"))
    for policy in (Chain(n_max), Tree.chain(n_max)):
        found = replay(recording, policy)
        assert lists(found) == [[listed]]
        assert (found.tokens, found.prompts[0].stop) == (2, "eog")
        s = found.snapshot
        assert (first(s.drafted), first(s.accepted)) == (drafted, accepted)
        assert first(s.reached) == drafted
        assert s.censored[reason, length] == 1
        assert s.censored.sum() == 1


def test_a_draft_that_p_min_stopped_after_the_end_of_generation():
    recording = trace(prompt(END, depth=3, stop="eog", p_min_p=[[0.9, 0.9, 0.4]] * 2))
    found = replay(recording, Chain(3, p_min=0.5))
    assert lists(found) == [[(2, 2)]]
    assert (found.snapshot.stopped.sum(), found.snapshot.censored[3, 2]) == (0, 1)


@pytest.mark.parametrize("policy", [GatedSiblings(3, p1_max=1.0, p2_min=0.1),
                                    Tree([(1,), (2,), (1, 1)])])  # fmt: skip
def test_nothing_was_cut_below_a_sibling(policy):
    # a single token may be drafted; the second choice is right, and none would have followed it
    found = replay(trace(prompt([[2, 0], [0], [0]], depth=3)), policy, n_predict=2)
    assert lists(found)[0][0] == (2, 1)
    assert (found.snapshot.censored[0, 1], found.snapshot.censored.sum()) == (1, 1)


def test_a_sibling_that_ends_the_generation_is_accepted():
    recording = trace(prompt([[2]], depth=3, stop="eog"))
    found = replay(recording, GatedSiblings(2, p1_max=1.0, p2_min=0.1))
    assert lists(found) == [[(4, 1)]]  # two tokens and a sibling beside each
    assert (found.tokens, found.prompts[0].stop) == (1, "eog")


def test_a_single_candidate_has_no_second_one_to_count():
    p = np.full((3, 1, 8), np.nan, np.float32)
    p[:, :, 0] = 0.5
    s = replay(trace(prompt([[1]] * 3, depth=1, p=p)), Chain(1)).snapshot
    assert (s.calib_p1[0, 5].tolist(), s.calib_p2.sum()) == ([1, 1], 0)


def test_a_target_without_logits():
    found = replay(text(stop="nan"), Chain(3))
    # root 0: two of three; root 3: one; root 5 would go past what is known
    assert lists(found) == [[(3, 2), (3, 1)]]
    assert found.snapshot.invalid == 1
    assert found.prompts[0].stop == "nan"
    # of two tokens each the verifications come out even with the text
    found = replay(text(stop="nan"), Chain(2))
    assert (found.tokens, found.prompts[0].stop) == (8, "nan")


def test_a_head_without_logits():
    p = np.tile(np.float32(P), (8, 3, 1))
    p[0, 1] = np.nan
    found = replay(text(p=p), Chain(3))
    # root 0 fails at its second step: nothing is sent. Then root 1: one of three; 3: one; 5: end
    assert lists(found) == [[(0, 0), (3, 1), (3, 1)]]
    assert (found.snapshot.invalid, found.snapshot.verifications) == (1, 2)
    assert found.totals.widths.tolist() == [[0, 2 + 3 + 3]]


@pytest.mark.parametrize(
    ("depth", "tree", "pair", "steps"),
    [
        (0, Tree([(2,)]), (0, 0), [0, 1]),
        (0, Tree.chain(2), (0, 0), [0, 1]),
        (1, Tree.chain(2), (0, 0), [0, 2]),
        (1, Tree([(1,), (2,), (1, 2), (2, 1), (2, 2)]), (0, 0), [0, 1, 1]),
        (1, Tree([(1,), (2,), (2, 1)]), (3, 1), [0, 2]),
    ],
)
def test_a_tree_fails_where_it_goes_on_from_no_logits(depth, tree, pair, steps):
    p = np.tile(np.float32(P), (8, 3, 1))
    p[0, depth] = np.nan
    found = replay(text(p=p), tree, n_predict=0)
    assert lists(found) == [[pair]]
    assert found.totals.widths.tolist() == [steps]


def test_a_tree_fails_where_nothing_is_known_of_the_head():
    p = np.tile(np.float32(P), (8, 3, 1))
    p[0, 0] = np.nan
    recording = trace(prompt([[], *RANKS[1:]], depth=3, n_prompt=2, p=p))
    found = replay(recording, Tree.chain(2), n_predict=0)
    assert lists(found) == [[(0, 0)]]
    assert (found.snapshot.invalid, found.snapshot.unresolved) == (1, 0)


def test_a_shared_head_cannot_draft_at_the_first_position():
    recording = trace(prompt(RANKS, depth=3), heads="shared")
    found = replay(recording, Chain(3))
    assert lists(found)[0][:2] == [(0, 0), (3, 1)]
    assert found.snapshot.censored[2, 0] == 1
    uniform = replay(recording, Chain(3), starts="uniform")
    assert uniform.n_verifications == 5  # roots 1 to 5: root 0 is none


def test_chained_heads_draft_no_deeper_than_they_are():
    recording = trace(prompt(RANKS, depth=3, n_prompt=2), heads="chain", n_blocks=2)
    assert reach(recording) == 2
    assert lists(replay(recording, Chain(16))) == lists(replay(text(), Chain(2)))
    with pytest.raises(InputError, match="n_min is above 2"):
        replay(recording, Chain(8, n_min=3))
    with pytest.raises(InputError, match="is 3 deep, this model has heads for 2"):
        replay(recording, Tree.chain(3))


def test_totals_of_several_prompts_stay_apart():
    recording = trace(prompt(RANKS, depth=3, n_prompt=2), prompt(END, depth=3, stop="eog"))
    found = totals(recording, Chain(2))
    assert found.tokens.tolist() == [8, 2]
    assert found.verifications.tolist() == [3, 1]
    assert found.accepted.tolist() == [5, 2]
    assert found.rows.tolist() == [[0, 0, 0, 3], [0, 0, 0, 1]]


# ---- other shapes


def test_tree():
    recording = text(off_p=[P, [0.375] + [0.0625] * 7, P], off_top10=[0.9375, 0.9375, 0.9375])
    found = replay(recording, Tree([(1,), (2,), (2, 1)]))
    # root 0: the leaf 1; root 2: 2 and 1 below it; root 5: the leaf 1; root 7: the text ends
    assert lists(found) == [[(3, 1), (3, 2), (3, 1)]]
    assert found.tokens == 7
    s = found.snapshot
    assert (first(s.drafted), first(s.reached), first(s.accepted)) == (
        [3, 3, 0], [3, 1, 0], [3, 1, 0],
    )  # fmt: skip
    assert s.rank[0, :3].tolist() == [2, 1, 0]
    assert s.rank[1, :3].tolist() == [1, 0, 0]
    assert s.sum_p[1, :2].tolist() == [0.375, 0.0625]  # below rank 2: not the greedy path
    assert s.sum_p_top10[1, 0] == pytest.approx(0.4, abs=1e-6)
    assert s.calib_p1[1, 3].tolist() == [1, 1]
    assert s.censored.tolist()[0][:4] == [0, 2, 1, 0]
    assert s.unresolved == 1
    assert found.totals.rows.tolist() == [[0, 0, 0, 0, 3]]
    assert found.totals.widths.tolist() == [[0, 6]]


def test_shares_of_the_ten_best_are_at_most_1():
    sure = [1.0, *[0.0] * 7]
    # root 0 is at (2, 1), off the head's own path; of its sum the last bit is missing
    recording = trace(prompt([[2, 1], [0], [0]], 2, off_p=[sure], off_top10=[0.999]))
    s = replay(recording, Tree([(2,), (2, 1)])).snapshot
    assert (s.sum_p[1, 0], s.sum_p_top10[1, 0]) == (1.0, 1.0)
    assert s.calib_p1[1, 9].tolist() == [1, 1]
    # ten best that come to nothing: only the share that was recorded counts
    s = replay(trace(prompt([[1], [0]], 1, top10=np.zeros((2, 1)))), Chain(1), n_predict=0).snapshot
    assert s.sum_p_top10[0].tolist() == pytest.approx([P[0] / TOP10, *[0.0] * 7], abs=1e-7)


def test_a_tree_s_head_runs_every_node_with_children_once_a_step():
    tree = Tree([(1,), (2,), (3,), (1, 1), (2, 1), (2, 2), (1, 1, 1)])
    found = replay(text(), tree, n_predict=0)
    assert found.n_verifications == 1
    # step 1: the root; step 2: nodes 1 and 2; step 3: node (1, 1)
    assert found.totals.widths.tolist() == [[0, 2, 1]]
    assert found.totals.rows.tolist() == [[0] * 8 + [1]]


def test_a_tree_is_cut_by_depth():
    tree = Tree([(1,), (2,), (1, 1), (1, 1, 1)])
    found = replay(text(), tree, n_predict=3)
    # two tokens may be drafted: three nodes. Then nothing is cut.
    assert lists(found) == [[(3, 2), (4, 1)]]
    assert found.snapshot.censored[1, 2] == 1


def test_no_draft_at_all_is_plain_decoding():
    found = replay(text(), Tree(), n_predict=4)
    assert lists(found) == [[(0, 0)] * 5]
    assert found.totals.rows.tolist() == [[0, 5]]
    assert found.totals.widths.tolist() == [[0]]


def test_siblings_stand_where_the_head_doubts():
    p = np.tile(np.float32(P), (8, 3, 1))
    p[2, 0, :3] = 0.5, 0.375, 0.0625
    p[1, 1, 0] = 0.75
    gated = GatedSiblings(2, p1_max=0.5, p2_min=0.25, p3_min=0.0625)
    found = replay(text(p=p), gated)
    # everywhere p1 0.5, p2 0.25, p3 0.0625: two siblings beside each of two tokens
    assert lists(found) == [[(6, 2), (6, 1), (6, 2)]]
    found = replay(text(p=p), GatedSiblings(1, p1_max=0.5, p2_min=0.3))
    # root 0: one token, no sibling; root 2: its second choice stands and is right; root 4: miss;
    # root 5: one; root 7: the text ends
    assert lists(found) == [[(1, 1), (2, 1), (1, 0), (1, 1)]]
    s = found.snapshot
    assert s.rank[0, :2].tolist() == [2, 1]
    assert (s.accepted[0], s.miss[0]) == (3, 1)
    assert found.totals.widths.tolist() == [[0, 4]]
    assert found.totals.rows.tolist() == [[0, 0, 3, 1]]
    # nowhere in doubt enough
    assert replay(text(p=p), GatedSiblings(2, p1_max=0.49)).drafted == 6


def test_adaptive_depth():
    ranks = [[1, 1, 1]] * 14
    ranks[5] = [2, 1, 1]
    ranks[4] = [1, 2, 1]
    ranks[3] = [1, 1, 2]
    recording = trace(prompt([*ranks[:11], [1, 1, 1], [1, 1], [1]], depth=3))
    found = replay(recording, AdaptiveDepth(3, start=1, up=1, down=2))
    # 1 of 1 at root 0, 2 of 2 at root 2; 0 of 3 at root 5; 1 of 1 at 6, 2 of 2 at 8, 3 of 3 at 11
    # would need a token more than there is
    assert lists(found) == [[(1, 1), (2, 2), (3, 0), (1, 1), (2, 2)]]
    # each text starts anew
    both = replay(trace(*recording.prompts, *recording.prompts), AdaptiveDepth(3, start=1, down=2))
    assert lists(both)[0] == lists(both)[1]


# ---- starts


def test_uniform_starts_count_every_root_once():
    found = replay(text(), Chain(3), starts="uniform")
    # three tokens after them are known of roots 0 to 5
    assert lists(found) == [[(3, 2), (3, 1), (3, 0), (3, 1), (3, 0), (3, 3)]]
    assert first(found.snapshot.reached) == [6, 4, 2]
    assert first(found.snapshot.accepted) == [4, 2, 1]
    assert found.totals.length == pytest.approx(1 + 7 / 6)
    assert replay(text(), Chain(3), starts="uniform", n_predict=2).n_verifications == 3
    assert replay(text(), Chain(3), starts="uniform", n_ctx=2).n_verifications == 6


def test_starts_of_every_other_root():
    recording = trace(by_chance(1, every=2), every=2)
    assert replay(recording, Chain(2), starts="uniform").n_verifications == 14
    with pytest.raises(InputError, match="every 2th root only"):
        replay(recording, Chain(2))
