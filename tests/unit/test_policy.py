"""Policies: what they refuse, their words on the command line and back."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpstats.errors import InputError
from mtpstats.policy import (
    AdaptiveDepth,
    Chain,
    Eagle2,
    GatedSiblings,
    OptTree,
    Policy,
    Tree,
    parse_policy,
)

WORDS = [
    ("chain:n_max=4", Chain(4)),
    ("chain:n_max=4,p_min=0.6", Chain(4, 0.6)),
    ("chain:n_max=8,p_min=0.25,n_min=2", Chain(8, 0.25, 2)),
    ("gated:n_max=4", GatedSiblings(4)),
    ("gated:n_max=4,p1_max=0.7,p2_min=0.2", GatedSiblings(4, p1_max=0.7, p2_min=0.2)),
    ("gated:n_max=4,p3_min=0.1", GatedSiblings(4, p3_min=0.1)),
    ("adaptive:n_max=8", AdaptiveDepth(8)),
    ("adaptive:n_max=8,low=2,start=3,up=1,down=2,p_min=0.1", AdaptiveDepth(8, 2, 3, 1, 2, 0.1)),
    ("opttree:n_nodes=8,depth=6,width=2", OptTree(8, 6, 2)),
    ("opttree:n_nodes=8,depth=6,width=2,delta=0.1", OptTree(8, 6, 2, 0.1)),
    ("eagle2:n_nodes=60,depth=6,width=10", Eagle2(60, 6, 10)),
    ("tree:[[0],[1],[0,0]]", Tree([(1,), (1, 1), (2,)])),
    ("tree:[]", Tree()),
]


@pytest.mark.parametrize(("words", "policy"), WORDS)
def test_words_and_back(words, policy):
    assert parse_policy(words) == policy
    assert str(policy) == words


@given(st.integers(1, 16), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_any_policy_comes_back_from_its_words(n_max, p_min, p1, p2, p3):
    for policy in (
        Chain(n_max, p_min, n_max // 2),
        GatedSiblings(n_max, p_min, 0, p1, p2, p3),
        AdaptiveDepth(n_max, p_min=p_min, low=1 + n_max // 2),
        OptTree(60 * n_max, n_max, 17 - n_max, p1),
        Eagle2(n_max, n_max, n_max),
    ):
        assert parse_policy(str(policy)) == policy


def test_spaces_in_any_order():
    assert parse_policy("chain: p_min = 0.5 , n_max = 3") == Chain(3, 0.5)


def test_tree_files(tmp_path):
    path = tmp_path / "tree.json"
    for content in ([[0], [0, 1]], {"choices": [[0], [0, 1]], "nodes": 2}):
        path.write_text(json.dumps(content))
        assert parse_policy(f"tree:{path}") == Tree([(1,), (1, 2)])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("", "is none of chain:..., gated:..., adaptive:..., opttree:..., eagle2:..., tree:..."),
        ("chain", "its kind is none of"),
        ("width:n_max=3", "its kind is none of"),
        ("chain:", "n_max is missing"),
        ("chain:p_min=0.5", "n_max is missing"),
        ("chain:n_max=3,p_max=1", "'p_max' is none of n_max, p_min, n_min"),
        ("chain:n_max=3,n_max=4", "n_max is given twice"),
        ("chain:n_max=three", "n_max is 'three', no number"),
        ("chain:n_max=3.5", "n_max is '3.5', no number"),
        ("chain:n_max", "n_max is '', no number"),
        ("chain:n_max=0", "n_max is 0: a policy drafts 1 to 16"),
        ("chain:n_max=17", "n_max is 17"),
        ("chain:n_max=3,n_min=4", "n_min is 4: it must lie between 0 and n_max 3"),
        ("chain:n_max=3,p_min=1.5", "p_min is 1.5"),
        ("chain:n_max=3,p_min=nan", "p_min is nan"),
        ("gated:n_max=3,p1_max=2", "p1_max is 2.0: it must lie between 0 and 1"),
        ("gated:n_max=3,p2_min=nan", "p2_min is nan"),
        ("gated:n_max=3,p2_min=inf", "p2_min is inf"),
        ("adaptive:n_max=3,low=4", "low is 4"),
        ("adaptive:n_max=3,low=0", "low is 0"),
        ("adaptive:n_max=3,low=2,start=1", "start is 1"),
        ("adaptive:n_max=3,up=-1", "up is -1"),
        ("opttree:n_nodes=8,depth=6", "width is missing"),
        ("opttree:depth=6,width=2", "n_nodes is missing"),
        ("opttree:n_nodes=0,depth=6,width=2", "n_nodes is 0: a tree has 1 to 1023"),
        ("opttree:n_nodes=8,depth=17,width=2", "depth is 17: a policy drafts 1 to 16"),
        ("opttree:n_nodes=8,depth=6,width=17", "width is 17: a step expands 1 to 16"),
        ("opttree:n_nodes=8,depth=6,width=2,delta=-1", "delta is -1.0"),
        ("opttree:n_nodes=8,depth=6,width=2,delta=nan", "delta is nan"),
        ("eagle2:n_nodes=8,depth=6,width=0", "width is 0"),
        ("eagle2:n_nodes=8,depth=6,width=2,delta=1", "'delta' is none of n_nodes, depth, width"),
        ("tree:[[0,0]]", "path [0, 0] has no parent"),
        ("tree:[[0],[0]]", "path [0] is given twice"),
        ("tree:[[8]]", "path [8] has a rank outside 0..7"),
        ("tree:[[-1]]", "path [-1] has a rank outside 0..7"),
        ("tree:[[]]", "is not 1 to 16 ranks long"),
        ("tree:[[0], 1]", "not a list of lists of ranks from 0"),
        ("tree:[[0.5]]", "not a list of lists of ranks from 0"),
        ("tree:[[true]]", "not a list of lists of ranks from 0"),
        ("tree:[[0]", "not JSON"),
        ("tree:" + "[" * 100_000, "not JSON"),
        ("tree:none.json", "none.json: cannot be read: No such file"),
        ("tree:a\0b", "cannot be read: embedded null byte"),
    ],
)
def test_words_that_are_no_policy(words, error):
    with pytest.raises(InputError) as caught:
        parse_policy(words)
    assert error in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("rank", [0, 9])
def test_rank_paths_count_from_one(rank):
    with pytest.raises(InputError, match=rf"path \[{rank}\] has a rank outside 1\.\.8"):
        Tree([(rank,)])


def test_a_tree_file_of_something_else(tmp_path):
    path = tmp_path / "tree.json"
    for content in ('{"tree": 1}', "3", "\udcff".encode("utf-8", "surrogateescape")):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(InputError, match=r"not a list of lists|not UTF-8"):
            parse_policy(f"tree:{path}")


def test_trees_in_other_engines_form():
    tree = Tree([(2,), (1, 3), (1,), (1, 3, 1)])
    assert tree.choices() == [[0], [1], [0, 2], [0, 2, 0]]
    assert Tree.from_choices(tree.choices()) == tree
    assert (len(tree), tree.depth) == (4, 3)
    assert Tree.chain(2).paths == ((1,), (1, 1))
    assert (len(Tree()), Tree().depth) == (0, 0)
    assert hash(tree) == hash(Tree(reversed(tree.paths)))
    assert repr(tree) == "<tree:[[0],[1],[0,2],[0,2,0]]>"
    with pytest.raises(InputError, match="choices must be"):
        Tree.from_choices(["x"])


def test_defaults():
    assert (GatedSiblings(3).p1_max, GatedSiblings(3).p2_min) == (1.0, 0.0)
    assert GatedSiblings(3).p3_min == math.inf
    assert (AdaptiveDepth(5).first, AdaptiveDepth(5, start=2).first) == (5, 2)


def test_a_policy_of_ones_own_is_called_by_its_class():
    class Mine(Policy):
        def draft(self, root):
            return 0

    assert str(Mine()) == "Mine"


def test_what_a_tree_costs_follows_from_its_shape() -> None:
    #     1        2      3
    #   1   2      1
    #   1
    tree = Tree([(1,), (2,), (3,), (1, 1), (1, 2), (2, 1), (1, 1, 1)])
    assert tree.leaves == 4
    assert tree.widths == [1, 2, 1]
    assert tree.changes == 2
    assert (Tree().leaves, Tree().widths, Tree().changes) == (1, [], 0)
    chain = Tree.chain(3)
    assert (chain.leaves, chain.widths, chain.changes) == (1, [1, 1, 1], 0)
    assert (GatedSiblings(3).leaves, GatedSiblings(3, p3_min=0.1).leaves) == (4, 7)
    assert GatedSiblings(3).changes == 0
