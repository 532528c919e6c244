"""The collector on drafts that are trees, and what becomes of their paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtpstats.errors import InputError
from mtpstats.stats import Collector


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
