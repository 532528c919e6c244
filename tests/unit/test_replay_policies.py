"""Replay of policies written in Python; what cannot be replayed; names and imports."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from made import RANKS, TOP10, P, lists, prompt, text, trace

import mtpstats
from mtpstats.errors import InputError
from mtpstats.policy import AdaptiveDepth, Chain, Policy, Tree
from mtpstats.replay import replay
from mtpstats.stats import Snapshot

# ---- policies in Python


class Recorded(Policy):
    """Drafts what it is told, and keeps what it heard."""

    def __init__(self, *drafts):
        self.drafts, self.seen, self.heard, self.began = list(drafts), [], [], 0

    def begin(self):
        self.began += 1

    def draft(self, root):
        self.seen.append((root.position, root.depth, root.limit, root.p.shape, root.p_top10[0]))
        return self.drafts.pop(0)

    def verified(self, drafted, accepted):
        self.heard.append((drafted, accepted))


def test_a_policy_in_python_sees_its_root_and_hears_what_became_of_it():
    policy = Recorded(2, Tree([(1,), (1, 1), (2,)]), (1, 3), 0)
    found = replay(text(), policy, n_predict=6)
    # root 0: two; root 3: one of three nodes; root 5: one, after which three steps were run; 7: end
    assert lists(found) == [[(2, 2), (3, 1), (1, 1)]]
    assert policy.heard == lists(found)[0]
    assert [seen[:4] for seen in policy.seen] == [
        (1, 3, 3, (3, 8)), (4, 3, 2, (3, 8)), (6, 3, 3, (3, 8)),
    ]  # fmt: skip
    assert policy.seen[0][4] == np.float32(P[0] / TOP10)
    assert policy.began == 1
    assert found.totals.widths.tolist() == [[0, 2 + 2 + 3]]


def test_steps_of_the_head_are_counted_however_short_the_draft_was_cut():
    for draft in (3, Tree.chain(3)):
        found = replay(text(), Recorded((draft, 5), 0, 0, 0), n_predict=2)
        assert lists(found)[0][0] == (1, 1)
        assert found.totals.widths.tolist() == [[0, 5]]


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (4, "drafted 4 tokens; the trace holds 3"),
        (-1, "drafted -1 tokens"),
        ("x", "neither a length nor a tree"),
        (None, "neither a length nor a tree"),
        ((1, 2, 3), "neither a length nor a tree"),
        ((1, -1), "ran -1 steps"),
        (Tree.chain(4), "record with --depth 4"),
    ],
)
def test_drafts_that_are_none(draft, words):
    with pytest.raises(InputError, match=words):
        replay(text(), Recorded(draft))


def test_what_a_policy_raises_reaches_the_caller():
    with pytest.raises(IndexError):
        replay(text(), Recorded())


def test_a_policy_that_drafts_nothing_cannot_be_made():
    with pytest.raises(TypeError, match="draft"):
        Policy()


# ---- limits and names


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        (Chain(4), {}, "drafts 4 deep, the trace holds 3: record with --depth 4"),
        (AdaptiveDepth(4), {}, "record with --depth 4"),
        (Tree.chain(5), {}, "record with --depth 5"),
        (Chain(3), {"n_predict": 21}, "n_predict is 21: the trace holds 20"),
        (Chain(3), {"n_predict": -1}, "n_predict is -1: the trace holds 20"),
        (Chain(3), {"n_ctx": 0}, "n_ctx is 0"),
        (Chain(3), {"starts": "some"}, "starts is 'some'"),
        (AdaptiveDepth(2), {"starts": "uniform"}, "has no uniform starts"),
        ("chain:n_max=3", {}, "str is no policy"),
    ],
)
def test_what_cannot_be_replayed(policy, options, words):
    recording = trace(prompt(RANKS, depth=3), n_predict=20)
    with pytest.raises(InputError, match=words):
        replay(recording, policy, **options)


def test_an_empty_trace():
    found = replay(trace(prompt(RANKS, depth=3)).select([]), Chain(3))
    assert found.prompts == []
    assert found.snapshot == Snapshot()
    assert found.totals.length is None
    nothing = replay(trace(prompt([], depth=3)), Chain(3))
    assert lists(nothing) == [[]]


def test_the_package_s_replay_is_a_function_and_a_module():
    assert isinstance(mtpstats.replay(text(), mtpstats.Chain(n_max=2)), Snapshot)
    assert (
        mtpstats.replay(text(), Chain(2), n_predict=3)
        == replay(text(), Chain(2), n_predict=3).snapshot
    )
    code = (
        "import mtpstats; first = mtpstats.replay; import mtpstats.replay;"
        "from mtpstats.replay import replay; from mtpstats import replay as again;"
        "assert first is mtpstats.replay is again and callable(again) and replay is not again"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_replaying_needs_no_libllama():
    code = (
        "import sys, mtpstats.replay, mtpstats.trees, mtpstats.uniform, mtpstats.figures;"
        "sys.exit(any(name.startswith('mtpstats.llama') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
