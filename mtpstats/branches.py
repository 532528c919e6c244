"""Trees in the target's memory: how one pass verifies them, and how one path of them stays.

Where a token can belong to several sequences (attention only), each leaf is a sequence that shares
the text, and a node belongs to all leaves below it: a pass of 1 + nodes rows. Where memory is
recurrent, each leaf is a chain of its own from the last accepted token on, all equally long: leaves
times 1 + depth rows. The order of the calls is what libllama gets right without copying states; the
same calls in another order leave wrong states behind without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtpstats.errors import InputError
from mtpstats.llama import Batch, Context
from mtpstats.policy import Path
from mtpstats.recovery import Cut
from mtpstats.slot import Slot

__all__ = ["Chains", "Coupled", "Nodes"]


class Nodes:
    """A tree's nodes by number: 0 is the last accepted token, parents come before children.

    ``paths`` are shallower first, then by rank, as ``Tree.paths``. ``children`` are by rank.
    ``leaves`` are in the order of a walk that takes lower ranks first, so that the head's own best
    path ends at leaf 0; ``below`` holds the indices of the leaves below each node.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        number: dict[Path, int] = {(): 0}
        self.n = len(paths)
        self.parent, self.rank, self.level = [-1], [0], [0]
        self.children: list[list[int]] = [[] for _ in range(self.n + 1)]
        for i, path in enumerate(paths, 1):
            number[path] = i
            parent = number[path[:-1]]
            self.parent.append(parent)
            self.rank.append(path[-1])
            self.level.append(len(path))
            self.children[parent].append(i)
        self.depth = self.level[-1]
        self.leaves: list[int] = []
        self.below: list[list[int]] = [[] for _ in range(self.n + 1)]
        self._walk(0)
        inner = [node for node in range(self.n + 1) if self.children[node]]
        self.n_branches = sum(
            not any(self.children[child] for child in self.children[node]) for node in inner
        )
        """Sequences that the head drafts it in: those of nodes whose children have none."""

    def _walk(self, node: int) -> None:
        first = len(self.leaves)
        for child in self.children[node]:
            self._walk(child)
        if not self.children[node]:
            self.leaves.append(node)
        self.below[node] = list(range(first, len(self.leaves)))

    def path(self, leaf: int) -> list[int]:
        """The nodes from the root to a node."""
        found = [leaf]
        while found[-1]:
            found.append(self.parent[found[-1]])
        return found[::-1]


class Coupled(Cut):
    """Leaves as sequences that share cells; sequence 0 is the text's between verifications.

    Args:
        target: made with :meth:`options`.
        n_leaves, n_nodes: most of a tree. depth: its deepest level.
    """

    kind = "coupled"

    def __init__(self, target: Context, n_leaves: int, n_nodes: int, depth: int) -> None:
        super().__init__(target)
        self._n_leaves = n_leaves
        rows = self.rows(n_leaves, n_nodes, depth)
        if rows > target.n_batch:
            raise InputError(
                f"n_batch is {target.n_batch}; a tree of {n_nodes} nodes makes {rows} rows here: "
                "raise --batch-size or draft less"
            )
        self.batch = Batch(rows, n_seq_max=n_leaves)

    @staticmethod
    def rows(n_leaves: int, n_nodes: int, depth: int) -> int:
        """Rows of a pass."""
        return 1 + n_nodes

    @staticmethod
    def options(n_leaves: int, depth: int) -> dict[str, Any]:
        """Options of the context. Windows forget nothing, for forgotten cells may be shared."""
        return {"n_seq_max": n_leaves, "kv_unified": True, "swa_full": True}

    def clear(self, slot: Slot) -> None:
        """Remove the text."""
        for seq in range(self._n_leaves):
            self._target.seq_rm(seq)

    def place(self, slot: Slot, nodes: Nodes, tokens: Sequence[int]) -> list[int]:
        """Fill ``batch`` with a tree; return each node's index in it."""
        batch, add = self.batch, self.batch.add
        for seq in range(1, len(nodes.leaves)):
            self._target.seq_cp(0, seq)
        batch.clear()
        n_past = slot.n_past
        return [
            add(token, n_past + level, below[0] if len(below) == 1 else below, True)
            for token, level, below in zip(tokens, nodes.level, nodes.below, strict=True)
        ]

    def settle(self, nodes: Nodes, node: int, start: int) -> None:
        """Leave in memory, of the tree that begins at position ``start``, the path to a node."""
        target, winner = self._target, nodes.below[node][0]
        end = start + 1 + nodes.level[node]
        for seq in range(1, len(nodes.leaves)):
            if seq != winner:
                target.seq_rm(seq)
        if winner:
            target.seq_rm(0, start)
            target.seq_cp(winner, 0, start, end)
            target.seq_rm(winner)
        else:
            target.seq_rm(0, end)


class Chains(Coupled):
    """Equally long chains on recurrent memory; between verifications all sequences are the text.

    A chain that has nothing of its own to say, and the end of one that is shorter, is filled up:
    sequences that did not take part could not follow the others.
    """

    kind = "chains"
    _alike = False

    def __init__(self, target: Context, n_leaves: int, n_nodes: int, depth: int) -> None:
        super().__init__(target, n_leaves, n_nodes, depth)
        rows = self.rows(n_leaves, n_nodes, depth)
        if rows > target.n_ubatch:
            raise InputError(
                f"n_ubatch is {target.n_ubatch}; {n_leaves} branches of {depth} tokens and one "
                f"more each make {rows} rows: raise --ubatch-size or draft less"
            )

    @staticmethod
    def rows(n_leaves: int, n_nodes: int, depth: int) -> int:
        """See :class:`Coupled`."""
        return n_leaves * (1 + depth)

    @staticmethod
    def options(n_leaves: int, depth: int) -> dict[str, Any]:
        """See :class:`Coupled`."""
        return {**Coupled.options(n_leaves, depth), "n_rs_seq": depth}

    def clear(self, slot: Slot) -> None:
        """See :class:`Coupled`."""
        super().clear(slot)
        self._alike = False

    def place(self, slot: Slot, nodes: Nodes, tokens: Sequence[int]) -> list[int]:
        """See :class:`Coupled`."""
        if not self._alike:
            for seq in range(1, self._n_leaves):
                self._target.seq_cp(0, seq)
            self._alike = True
        batch, n_past = self.batch, slot.n_past
        batch.clear()
        index = [-1] * (nodes.n + 1)
        for seq in range(self._n_leaves):
            path = nodes.path(nodes.leaves[seq if seq < len(nodes.leaves) else 0])
            for level in range(nodes.depth + 1):
                node = path[min(level, len(path) - 1)]
                new = level < len(path) and index[node] < 0
                at = batch.add(tokens[node], n_past + level, seq, new)
                if new:
                    index[node] = at
        return index

    def settle(self, nodes: Nodes, node: int, start: int) -> None:
        """See :class:`Coupled`."""
        target, winner = self._target, nodes.below[node][0]
        end = start + 1 + nodes.level[node]
        others = [seq for seq in range(self._n_leaves) if seq != winner]
        if nodes.level[node] == nodes.depth:
            for seq in others:
                target.seq_rm(seq)
                target.seq_cp(winner, seq)
            return
        for seq in range(self._n_leaves):
            if seq != winner:
                target.seq_rm(seq, start, end)
            target.seq_rm(seq, end)
        for seq in others:
            target.seq_cp(winner, seq, start, end)
