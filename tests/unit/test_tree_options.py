"""``bench --tree``: words into what is drafted; the numbers of nodes; results that hold trees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made import prompt, trace

from mtpstats import result as results
from mtpstats.branches import Chains, Coupled, Nodes
from mtpstats.cli.options import DraftOptions
from mtpstats.cli.tree import TreeOptions, draft_settings
from mtpstats.errors import InputError
from mtpstats.head import DraftSettings
from mtpstats.policy import GatedSiblings, Tree
from mtpstats.trace import Trace
from mtpstats.tracefile import TraceWriter

PLAIN = DraftOptions(8, 0, 0.0)


def asked(tree: str | None = None, gate: str | None = None, trace: Path | None = None) -> Any:
    return draft_settings(PLAIN, TreeOptions(tree, gate, trace))


def saved(found: Trace, path: Path) -> Path:
    with TraceWriter(path, found.header, False) as writer:
        for one in found.prompts:
            writer.append(one)
    return path


def test_words_become_what_is_drafted(tmp_path: Path) -> None:
    tree = Tree([(1,), (2,), (1, 1)])
    expected = DraftSettings(2, tree=tree)
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"choices": tree.choices()}))
    for words in ("[[0],[1],[0,0]]", "tree:[[0],[1],[0,0]]", str(file), f"tree:{file}"):
        assert asked(words) == expected
    gate = GatedSiblings(4, 0.25, 1, p1_max=0.7, p2_min=0.2)
    for words in ("n_max=4,p_min=0.25,n_min=1,p1_max=0.7,p2_min=0.2", str(gate)):
        assert asked(gate=words) == DraftSettings(4, 1, 0.25, gate)
    assert draft_settings(DraftOptions(3, 1, 0.5), TreeOptions(None, None, None)) == DraftSettings(
        3, 1, 0.5
    )


def test_the_best_tree_of_a_trace(tmp_path: Path) -> None:
    # The first choice 5 times, then the first again twice; the third choice 3 times.
    ranks = [[1, 1], [1, 3], [1, 3], [3, 1], [3, 0], [3, 0], [1, 1], [1, 0], [0]]
    for every, name in ((1, "run"), (2, "some")):
        kept = ranks[::every]
        one = prompt(kept, 2, n_prompt=3)
        if every == 1:
            found = asked("best:3", trace=saved(trace(one), tmp_path / name))
            assert found.tree is not None
            assert {(1,), (3,)} <= set(found.tree.paths)
            assert len(found.tree) == 3
    never = saved(trace(prompt([[0], [0]], 2)), tmp_path / "never")
    with pytest.raises(InputError, match="no nodes"):
        asked("best:3", trace=never)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tree": "best:4"}, "needs a recording"),
        ({"tree": "[[0]]", "gate": "n_max=2"}, "a draft is one of them"),
        ({"trace": Path("x")}, "--trace is for --tree best:N"),
        ({"tree": "[[0]]", "trace": Path("x")}, "--trace is for --tree best:N"),
        ({"gate": "n_max=2", "trace": Path("x")}, "--trace is for --tree best:N"),
        ({"tree": "[]"}, "no nodes"),
        ({"tree": "[[0,0]]"}, "has no parent"),
        ({"tree": "best:0"}, "a number from 1"),
        ({"gate": "p1_max=1"}, "n_max is missing"),
        ({"gate": "chain:n_max=2"}, "is none of"),
    ],
)
def test_what_is_no_tree_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        asked(**given)


def test_a_tree_says_how_deep_it_is() -> None:
    with pytest.raises(InputError, match="leave out --spec-draft"):
        draft_settings(DraftOptions(3, 0, 0.0), TreeOptions("[[0]]", None, None))


# ---- nodes


def test_nodes_by_number() -> None:
    #        0
    #    1       2      ranks 1, 2
    #  3   4     5      ranks 1, 2; 1
    #      6            rank 2
    nodes = Nodes(Tree([(1,), (2,), (1, 1), (1, 2), (2, 1), (1, 2, 2)]).paths)
    assert nodes.parent == [-1, 0, 0, 1, 1, 2, 4]
    assert nodes.level == [0, 1, 1, 2, 2, 2, 3]
    assert nodes.rank == [0, 1, 2, 1, 2, 1, 2]
    assert nodes.children == [[1, 2], [3, 4], [5], [], [6], [], []]
    assert (nodes.n, nodes.depth) == (6, 3)
    assert nodes.leaves == [3, 6, 5]
    assert nodes.below == [[0, 1, 2], [0, 1], [2], [0], [1], [2], [1]]
    assert nodes.path(6) == [0, 1, 4, 6]
    # The head goes on from 1, 2 and 4; 4 follows 1.
    assert nodes.n_branches == 2
    assert Coupled.rows(3, 6, 3) == 7
    assert Chains.rows(3, 6, 3) == 12


def test_a_root_alone() -> None:
    nodes = Nodes(())
    assert (nodes.n, nodes.depth, nodes.leaves, nodes.below) == (0, 0, [0], [[0]])
    assert Nodes(Tree.chain(3).paths).n_branches == 1


# ---- results


def test_figures_of_trees() -> None:
    totals = {"verifications": 40, "tokens": 100, "accepted": 60}
    assert results.wood({"total": totals}) is None
    wood = results.wood({"total": {**totals, "tree": {"nodes": 200, "levels": 80, "rows": 240}}})
    assert wood == results.Wood(200, 60, 140, 2.0, 5.0, 2.0, 6.0)
    nothing = {"verifications": 0, "tokens": 0, "accepted": 0}
    wood = results.wood({"total": {**nothing, "tree": {"nodes": 0, "levels": 0, "rows": 0}}})
    assert wood == results.Wood(0, 0, 0, None, None, None, None)
