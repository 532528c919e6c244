"""Drafts that branch, for real: the driver's rounds with a tree instead of a chain.

The head drafts all branches together, one decode a depth: a branch is a sequence of its memory that
shares the text and the path before. A node's children are the head's candidates there, by rank. The
target verifies the tree in one pass (``branches``), and its own choices lead down one path; that
path alone goes through the head afterwards. Verifications, counters and text are those that
``replay`` gives for the same policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

from mtpstats._core import Row
from mtpstats.branches import Chains, Coupled, Nodes
from mtpstats.errors import InputError
from mtpstats.generation import Trees
from mtpstats.head import DraftSettings, Head
from mtpstats.llama import Context
from mtpstats.policy import Branching, GatedSiblings, Path, Tree
from mtpstats.recovery import Memory, Probes
from mtpstats.slot import Slot, Text
from mtpstats.speculate import Speculator
from mtpstats.stats import Collector

__all__ = ["TreeSpeculator"]

SHAPES = 4096  # kept at most


class _Sizes:
    """What a policy can come to at most, and what the head needs for it."""

    def __init__(self, policy: Branching) -> None:
        if isinstance(policy, GatedSiblings):
            beside = tuple(range(2, 2 + policy.beside))
            widest = Nodes(_gated([beside] * policy.n_max))
        else:
            widest = Nodes(policy.paths)
        self.nodes, self.leaves, self.depth = widest.n, policy.leaves, widest.depth
        self.n_sequences = widest.n_branches - 1
        self.n_cells = widest.n_branches * self.depth

    def context(self) -> dict[str, Any]:
        """See ``recovery.Probes``."""
        if not self.n_sequences:
            return {}
        return {"n_seq_max": 1 + self.n_sequences, "kv_unified": True, "swa_full": True}


def _gated(siblings: Sequence[Sequence[int]]) -> list[Path]:
    """Return the paths of a chain with these ranks beside each of its nodes."""
    return [(1,) * i + (rank,) for i, beside in enumerate(siblings) for rank in (1, *beside)]


class _Drafter(ABC):
    """Drafts one text's trees with the head.

    Of the last draft: ``nodes``; ``tokens``, one of each node; ``missing``, the nodes for whose
    rank the head had no candidate, with a token that stands for none.
    """

    def __init__(self, head: Head, sizes: _Sizes, n_vocab: int, collector: Collector | None):
        self.head, self.collector = head, collector
        self.nodes, self.tokens = Nodes(()), [-1]
        self.missing: set[int] = set()
        self._n_logits, self._n_vocab = head.context.n_vocab, n_vocab
        row_bytes = 4 * head.context.n_embd_out
        self._branches = [Slot(seq, row_bytes) for seq in range(1 + sizes.n_sequences)]
        # Of each node that has children, or of a chain's positions: the head's candidates.
        self._rows = [Row() for _ in range(sizes.nodes + 1)]

    @property
    def trunk(self) -> Slot:
        """The text as far as the last draft was begun."""
        return self._branches[0]

    def draft(self, text: Slot) -> None:
        """Fill ``nodes`` and ``tokens``, and ``text.draft`` with all of the nodes' tokens."""
        self.head.prepare([text])
        trunk = self.trunk
        trunk.n_past, trunk.id_last, trunk.draft = text.n_past, text.id_last, []
        self.nodes, self.tokens = Nodes(()), [text.id_last]
        self.missing.clear()
        if text.n_steps:
            self._draft(text)
            if text.failed and self.collector is not None:
                self.collector.invalid(text.seq)
        text.draft = self.tokens[1:]

    @abstractmethod
    def _draft(self, text: Slot) -> None:
        """Fill ``nodes`` and ``tokens``."""

    @abstractmethod
    def tell(self, text: Slot, path: Sequence[int], leaf: bool) -> None:
        """Tell the collector which nodes were accepted, and whether anything followed them."""

    def _step(self, branches: Sequence[Slot], outputs: Sequence[int], step: int) -> list[int]:
        """Run what was fed through the head; return where the logits are."""
        head = self.head
        before = perf_counter_ns()
        head.step(branches, step)
        found = [head.context.logits_address(output) for output in outputs]
        head.ns += perf_counter_ns() - before
        head.batch.clear()
        return found

    def _give_up(self, text: Slot) -> None:
        text.failed = True
        self.nodes, self.tokens = Nodes(()), [text.id_last]


class _Static(_Drafter):
    """The same tree at every root, as deep as may be."""

    def __init__(
        self, policy: Tree, head: Head, sizes: _Sizes, n_vocab: int, collector: Collector | None
    ) -> None:
        super().__init__(head, sizes, n_vocab, collector)
        self._whole = Nodes(policy.paths)
        self._cut = [
            Nodes([path for path in policy.paths if len(path) <= depth])
            for depth in range(policy.depth + 1)
        ]

    def _draft(self, text: Slot) -> None:
        head, rows, free = self.head, self._rows, iter(self._branches[1:])
        nodes = self.nodes = self._cut[text.limit]
        tokens = self.tokens = [text.id_last, *[-1] * nodes.n]
        head.batch.clear()
        going = [(0, self.trunk)]
        outputs = [head.feed(self.trunk, text.id_last, text.row)]
        used: list[Slot] = []
        for step in range(nodes.depth):
            addresses = self._step([branch for _, branch in going], outputs, step)
            onward: list[tuple[int, Slot]] = []
            fed: list[int] = []
            for (node, branch), output, address in zip(going, outputs, addresses, strict=True):
                self._read(node, address, tokens)
                if rows[node].best < 0:
                    self._give_up(text)
                    onward = []
                    break
                first, *others = [c for c in nodes.children[node] if nodes.children[c]] or [0]
                for child in (*others, first):  # forks before the branch itself goes on
                    if child:
                        one = branch
                        if child != first:
                            one = next(free)
                            used.append(one)
                            head.fork(branch, one)
                        one.draft.append(tokens[child])
                        fed.append(head.feed(one, tokens[child], head.hidden(output, step)))
                        onward.append((child, one))
            if not onward:
                break
            going, outputs = onward, fed
        head.forget([text])
        for one in used:
            head.memory.seq_rm(one.seq)

    def _read(self, node: int, address: int, tokens: list[int]) -> None:
        """Take a node's children from a row of logits."""
        row = self._rows[node]
        read = row.best_at if self.collector is None else row.read_at
        read(address, self._n_logits, self._n_vocab)
        for child in self.nodes.children[node]:
            tokens[child] = row.id(self.nodes.rank[child])
            if tokens[child] < 0:
                tokens[child] = row.best
                self.missing.add(child)

    def tell(self, text: Slot, path: Sequence[int], leaf: bool) -> None:
        """See :class:`_Drafter`."""
        collector, nodes = self.collector, self.nodes
        if collector is None or text.failed:
            return
        asked = path[:-1] if leaf else path
        for depth, node in enumerate(asked):
            collector.candidates_row(text.seq, depth, self._rows[node])
        cut = self._whole.children[path[-1]]
        collector.verify_tree(
            text.seq, [self.tokens[node] for node in path[1:]], nodes.depth, leaf,
            text.reason if cut else "n_max",
        )  # fmt: skip


class _Gated(_Drafter):
    """A chain, and siblings where the head is in doubt."""

    def __init__(
        self,
        policy: GatedSiblings,
        head: Head,
        sizes: _Sizes,
        n_vocab: int,
        collector: Collector | None,
    ) -> None:
        super().__init__(head, sizes, n_vocab, collector)
        self._policy = policy
        self._shapes: dict[tuple[tuple[int, ...], ...], Nodes] = {}
        self._seen = 0
        self._stop = -1
        self._dropped = False

    def draft(self, text: Slot) -> None:
        """See :class:`_Drafter`."""
        self._seen, self._stop, self._dropped = 0, -1, False
        super().draft(text)

    def _draft(self, text: Slot) -> None:
        head, policy, trunk = self.head, self._policy, self.trunk
        head.batch.clear()
        output = head.feed(trunk, text.id_last, text.row)
        for step in range(text.n_steps):
            (address,) = self._step([trunk], [output], step)
            row = self._rows[step]
            row.read_at(address, self._n_logits, self._n_vocab)
            self._seen += 1
            if row.best < 0:
                self._give_up(text)
                break
            if policy.p_min and row.p_top10 < policy.p_min:
                self._stop = step
                break
            trunk.draft.append(row.best)
            if step + 1 < text.n_steps:
                output = head.feed(trunk, row.best, head.hidden(output, step))
        head.forget([text])
        if text.failed:
            return
        self._dropped = len(trunk.draft) < policy.n_min
        length = 0 if self._dropped else min(len(trunk.draft), text.limit)
        siblings = tuple(self._beside(row) for row in self._rows[:length])
        if siblings not in self._shapes:
            if len(self._shapes) >= SHAPES:
                self._shapes.clear()
            self._shapes[siblings] = Nodes(_gated(siblings))
        nodes = self.nodes = self._shapes[siblings]
        self.tokens += [
            self._rows[level - 1].id(rank)
            for level, rank in zip(nodes.level[1:], nodes.rank[1:], strict=True)
        ]

    def _beside(self, row: Row) -> tuple[int, ...]:
        """Return the ranks that are verified beside the first."""
        policy = self._policy
        if row.prob(1) > policy.p1_max:
            return ()
        least = ((2, policy.p2_min), (3, policy.p3_min))
        return tuple(rank for rank, p in least if row.prob(rank) >= p and row.id(rank) >= 0)

    def tell(self, text: Slot, path: Sequence[int], leaf: bool) -> None:
        """See :class:`_Drafter`."""
        collector, nodes = self.collector, self.nodes
        if collector is None or text.failed:
            return
        for step in range(self._seen):
            collector.candidates_row(text.seq, step, self._rows[step])
        if self._stop >= 0:
            collector.stop(text.seq, self._stop)
        if self._dropped:
            collector.drop(text.seq)
            return
        side = nodes.rank[path[-1]] > 1
        collector.verify_tree(
            text.seq, [self.tokens[node] for node in path[1:]], nodes.depth, leaf,
            "n_max" if side else text.reason,
        )  # fmt: skip


class TreeSpeculator(Speculator):
    """A :class:`Speculator` whose ``draft`` branches (``DraftSettings.branching``), for one text.

    ``Generation.verifications`` holds (nodes, accepted). Raises ``InputError`` for models whose
    memory cannot hold branches and for trees that do not fit into a pass.
    """

    def __init__(self, model: Any, *, draft: DraftSettings, **options: Any) -> None:
        if draft.tree is None:
            raise InputError("a TreeSpeculator needs a tree to draft")
        if options.get("n_parallel", 1) > 1 or options.get("prober") is not None:
            raise InputError(
                "drafts that branch are made for one text at a time, without recording it: leave "
                "out --parallel"
            )
        self._policy = draft.tree
        self._sizes = _Sizes(draft.tree)
        super().__init__(model, draft=draft, **options)
        assert self._head is not None
        assert isinstance(self._recovery, Coupled)
        self._layout = self._recovery
        head, sizes, collector = self._head, self._sizes, self.collector
        try:
            self._drafter: _Drafter
            if isinstance(draft.tree, GatedSiblings):
                self._drafter = _Gated(draft.tree, head, sizes, model.n_vocab, collector)
            elif head.deepest is not None and draft.tree.depth > head.deepest:
                raise InputError(
                    f"the tree is {draft.tree.depth} deep, this model has heads for {head.deepest}"
                )
            else:
                self._drafter = _Static(draft.tree, head, sizes, model.n_vocab, collector)
        except BaseException:
            self.close()
            raise
        self._index: list[int] = []
        self._path: list[int] = []

    @property
    def tree(self) -> dict[str, Any]:
        """What a result says of the tree: ``settings.tree``."""
        sizes, layout = self._sizes, self._layout
        return {
            "policy": str(self._policy),
            "nodes": sizes.nodes,
            "leaves": sizes.leaves,
            "depth": sizes.depth,
            "memory": layout.kind,
            "rows": layout.rows(sizes.leaves, sizes.nodes, sizes.depth),
        }

    def _forks(self, draft: DraftSettings) -> Probes | None:
        return self._sizes

    def _memory(self, target: Context) -> Memory:
        kind = self.model.kind.branches(target.rollback)
        if not kind:
            why = (
                "its memory takes no token back"
                if target.rollback == "none"
                else "its sequences can only be copied whole, and no token belongs to several"
            )
            raise InputError(f"{self.model.arch} cannot verify a tree: {why}")
        sizes, layout = self._sizes, Chains if kind == "chains" else Coupled
        if sizes.leaves > self.model.lib.max_sequences:
            raise InputError(
                f"the tree has {sizes.leaves} leaves; {self.model.lib.max_sequences} are possible"
            )
        return Memory(
            lambda target, _n, _batch: layout(target, sizes.leaves, sizes.nodes, sizes.depth),
            layout.options(sizes.leaves, sizes.depth),
            layout.rows(sizes.leaves, sizes.nodes, sizes.depth),
            1 + sizes.nodes,
        )

    def _draft(self, head: Head, texts: Sequence[Text]) -> None:
        (text,) = texts
        self._drafter.draft(text)

    def _pass(self, group: Sequence[Text]) -> None:
        """Run the target over the tree."""
        (text,) = group
        target, drafter, layout = self._target, self._drafter, self._layout
        before = perf_counter_ns()
        self._index = layout.place(text, drafter.nodes, drafter.tokens)
        target.decode(layout.batch)
        target.logits_address(self._index[0])  # waits for the pass to end
        self._target_ns += perf_counter_ns() - before
        if text.result.trees is None:
            text.result.trees = Trees()
        text.result.trees.add(drafter.nodes.n, drafter.nodes.depth, layout.batch.n_tokens)

    def _verify(self, text: Text) -> list[int]:
        """Return the target's tokens, and leave the nodes that they accept in ``_path``."""
        drafter, index = self._drafter, self._index
        children, tokens = drafter.nodes.children, drafter.tokens
        draw = partial(self._sampler.sample_at, n=self._target.n_vocab, n_vocab=self.model.n_vocab)
        chosen: list[int] = []
        path, node = [0], 0
        while True:
            token = draw(self._target.logits_address(index[node]), position=text.n_past + len(path))
            if token < 0:
                return []
            chosen.append(token)
            text.result.margins.append(self._sampler.margin)
            same = (child for child in children[node] if tokens[child] == token)
            node = next((child for child in same if child not in drafter.missing), 0)
            if not node:
                break
            path.append(node)
            # llama.cpp accepts an end-of-generation token only as the last of a draft.
            if children[node] and self.model.is_eog(token):
                break
        drafter.tell(text, path, not children[path[-1]])
        self._path = path
        return chosen

    def _settle(self, head: Head, text: Text, n_accepted: int) -> int:
        """Leave both memories with the path that was accepted."""
        drafter, target, index, path = self._drafter, self._target, self._index, self._path
        trunk = drafter.trunk
        rows = [target.nextn_address(index[node]) for node in path]
        head.follow_path(trunk, [drafter.tokens[node] for node in path], [text.row, *rows[:-1]])
        text.keep_row(rows[-1])
        before = perf_counter_ns()
        self._layout.settle(drafter.nodes, path[-1], trunk.n_past)
        self._target_ns += perf_counter_ns() - before
        return text.n_rows
