"""Probes: what the head would draft at every root of a text, found while the text is made.

A probe of root ``t`` is a sequence of its own in the memory the head attends to. It shares the
true text before ``t`` and goes on with a draft. The greedy path is fed with the head's own best
tokens, the forced path with the true ones; they are one draft up to the first rank that is not 1,
where a second sequence takes over the forced path. With a width there are more drafts at a root:
the nodes of its beams (``_beams``), of which the greedy path is the narrowest. Many roots go
through the head in one batch, a step of all drafts of all of them at a time. The ordinary driver
makes the text, and nothing of it is decoded twice (DESIGN section 4).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtpstats._beams import Beams
from mtpstats._core import Row, copy, overlap_at
from mtpstats.errors import InputError
from mtpstats.head import Head
from mtpstats.llama import Context
from mtpstats.slot import Slot
from mtpstats.trace import RANKS, UNKNOWN

TOGETHER = 32
"""Roots probed together."""
MAX_SEQUENCES = 255
"""Of probes, beside the text's."""
MAX_LOGITS = 256 << 20
"""Bytes of the target's logits that are kept at most, with fewer roots together if need be."""
KEPT = RANKS + 2  # float32 of a row of logits, as Row.fill writes them


@dataclass(frozen=True)
class Probed:
    """What was found at R roots, D deep; arrays as in :class:`mtpstats.trace.TracedPrompt`."""

    roots: npt.NDArray[np.int32]
    rank: npt.NDArray[np.uint8]
    p: npt.NDArray[np.float32]
    top10: npt.NDArray[np.float32]
    p_min_p: npt.NDArray[np.float32]
    off_index: npt.NDArray[np.int32]
    off_p: npt.NDArray[np.float32]
    off_top10: npt.NDArray[np.float32]
    overlap: npt.NDArray[np.float32]
    width: int
    beam_node: npt.NDArray[np.uint8]
    beam_p: npt.NDArray[np.float32]


class _Group:
    """What is found at roots that are probed together; ``kept`` rows are ``Row.fill``'s.

    ``layers`` holds, for each root and depth, the beams' nodes, as in
    ``TracedPrompt.beam_node``, and their rows.
    """

    def __init__(self, roots: Sequence[int], depth: int) -> None:
        n = len(roots)
        self.roots, self.depth = list(roots), depth
        self.layers: list[list[tuple[list[tuple[int, int]], npt.NDArray[np.float32]]]] = [
            [] for _ in roots
        ]
        self.rank = np.full((n, depth), UNKNOWN, np.uint8)
        self.overlap = np.full((n, depth), np.nan, np.float32)
        self.kept = np.full((n * depth, KEPT), np.nan, np.float32)
        self.off_kept = np.empty((n * depth, KEPT), np.float32)
        self.off_index: list[int] = []
        self._kept_at, self._off_at = self.kept.ctypes.data, self.off_kept.ctypes.data

    def keep(self, row: Row, path: _Path, step: int) -> None:
        """Keep a row of logits of a path at a root of the group."""
        index = path.root * self.depth + step
        if path.greedy:
            row.fill(self._kept_at + 4 * KEPT * index)
        elif path.true:
            row.fill(self._off_at + 4 * KEPT * len(self.off_index))
            self.off_index.append(index)
        if path.node is not None and self.layers[path.root]:
            row.fill(self.layers[path.root][step][1].ctypes.data + 4 * KEPT * path.node)

    def expand(self, root: int, nodes: list[tuple[int, int]]) -> None:
        """Make room for the rows of the next depth's nodes."""
        if nodes:
            rows = np.full((len(nodes), KEPT), np.nan, np.float32)
            self.layers[root].append((nodes, rows))


def _beams_of(groups: Sequence[_Group], width: int) -> dict[str, Any]:
    """The fields of :class:`Probed` that hold the beams."""
    layers = [
        (depth, nodes, rows)
        for group in groups
        for root in group.layers
        for depth, (nodes, rows) in enumerate(root)
    ]
    node = [(depth, *node) for depth, nodes, _ in layers for node in nodes]
    p = [rows[:, :RANKS] for _, _, rows in layers]
    return {
        "width": width,
        "beam_node": np.asarray(node, np.uint8).reshape(-1, 3),
        "beam_p": np.concatenate([np.empty((0, RANKS), np.float32), *p]),
    }


def _joined(groups: Sequence[_Group], depth: int, width: int) -> Probed:
    groups = [*groups, _Group([], depth)]
    firsts = np.cumsum([0, *(len(group.roots) for group in groups[:-1])]) * depth
    index = [np.asarray(g.off_index, np.int32) + f for g, f in zip(groups, firsts, strict=True)]
    off_index = np.concatenate(index).astype(np.int32)
    off_kept = np.concatenate([group.off_kept[: len(group.off_index)] for group in groups])
    order = np.argsort(off_index)
    kept = np.concatenate([group.kept for group in groups]).reshape(-1, depth, KEPT)
    return Probed(
        roots=np.asarray([root for group in groups for root in group.roots], np.int32),
        rank=np.concatenate([group.rank for group in groups]),
        p=kept[:, :, :RANKS].copy(),
        top10=kept[:, :, RANKS].copy(),
        p_min_p=kept[:, :, RANKS + 1].copy(),
        off_index=off_index[order],
        off_p=off_kept[order, :RANKS],
        off_top10=off_kept[order, RANKS],
        overlap=np.concatenate([group.overlap for group in groups]),
        **_beams_of(groups, width),
    )


class _Path(Slot):
    """A draft at a root, the ``root``-th of its group.

    ``true``: it is the text's, and then ``rank`` that of the text's next token; ``node``: its index
    among the beams' nodes of its depth, None for one that is only the text's; ``offered``: the
    head's best tokens after it.
    """

    node: int | None
    true: bool
    rank: int
    offered: list[int]

    def __init__(self, seq: int, row_bytes: int) -> None:
        super().__init__(seq, row_bytes)
        self.root = 0

    @property
    def greedy(self) -> bool:
        """Whether it is the head's own: the first in the order of rank paths."""
        return self.node == 0


class _Child(NamedTuple):
    """How a draft goes on; see :class:`_Path`."""

    node: int | None
    token: int
    true: bool


class _Rows:
    """Float32 rows of the latest ``capacity`` text positions."""

    def __init__(self, capacity: int, row_bytes: int) -> None:
        self._capacity, self._row_bytes = capacity, row_bytes
        self._buffer = ctypes.create_string_buffer(capacity * row_bytes)
        self._start = ctypes.addressof(self._buffer)

    def __getitem__(self, position: int) -> int:
        return self._start + position % self._capacity * self._row_bytes

    def __setitem__(self, position: int, address: int) -> None:
        copy(self[position], address, self._row_bytes)


class Prober:
    """Probes the text a :class:`mtpstats.speculate.Speculator` makes; give it to that one.

    Args:
        depth: draft steps at each root; a chain of NextN blocks has no more than blocks.
        every: probe the root at every so many positions.
        together: roots probed together at most. More are faster until a batch of all their drafts
            is bound by arithmetic.
        width: W of :class:`mtpstats.trace.TracedPrompt`: 0 keeps nothing off the two paths.
        n_batch: tokens that a batch of the contexts holds.

    ``paths`` is how many drafts there can be at a root. Once there is a driver ``depth`` is the one
    in force, and ``head_kind`` and ``n_blocks`` say what the head is. ``ns`` counts the nanoseconds
    spent here.
    """

    def __init__(
        self,
        depth: int,
        every: int = 1,
        together: int = TOGETHER,
        width: int = 0,
        n_batch: int = 2048,
    ) -> None:
        self.depth, self.every, self.width = depth, every, width
        # The nodes of a depth, and the forced path where it is none of them.
        self.paths = 1 + max(1, width * (width + 1) // 2)
        most = min(MAX_SEQUENCES, n_batch - 1)
        self._together = max(1, min(together, most // self.paths))
        self.ns = 0
        self.head_kind, self.n_blocks = "single", 1
        self._tokens: list[int] = []

    @property
    def n_sequences(self) -> int:
        """Sequences it needs beside the text's, from 1 on, in the memory the head attends to."""
        return self.paths * self._together

    @property
    def n_cells(self) -> int:
        """Cells it needs beside the text's, unless the head reads the target's."""
        return self.n_sequences * self.depth

    def context(self) -> dict[str, Any]:
        """Options of the context whose cells the head attends to."""
        return {"n_seq_max": 1 + self.n_sequences, "kv_unified": True, "swa_full": True}

    def attach(self, target: Context, head: Head, n_vocab: int) -> None:
        """Work on these contexts; the text is in their sequence 0."""
        self._target, self._head, self._n_vocab = target, head, n_vocab
        if head.deepest is not None:
            self.depth = min(self.depth, head.deepest)
        row_bytes = 4 * target.n_embd_out
        self._paths = [_Path(1 + i, row_bytes) for i in range(self.n_sequences)]
        self.head_kind, self.n_blocks = head.kind, head.context.model.n_layer_nextn
        # Tokens of a path in one batch: a chain decodes all of its draft again.
        n_tokens = 1 if head.deepest is None else self.depth
        fitting = head.context.n_batch // (self.paths * n_tokens)
        if not fitting:
            raise InputError(
                f"n_batch is {head.context.n_batch}: a step of the drafts of one root may take "
                f"{self.paths * n_tokens} tokens: raise --batch-size or record less wide"
            )
        affordable = MAX_LOGITS // (4 * n_vocab) // self.every
        self._at_once = max(1, min(self._together, fitting, affordable))
        # The roots of a group, the depth behind the last one, and what a verification adds; no
        # more than a text has.
        capacity = self._at_once * self.every + self.depth + head.n_max + 1
        capacity = min(capacity, target.n_ctx)
        self._before = _Rows(capacity, row_bytes)
        self._logits = _Rows(capacity, 4 * n_vocab)
        self._softmax: dict[int, tuple[float, bool]] = {}
        self._row = Row()

    def begin(self, prompt: Sequence[int], n_predict: int) -> None:
        """Probe the text that is made next, as far as a run of ``n_predict`` tokens can draft.

        Without this call the driver's text is not probed.
        """
        self._tokens = list(prompt)
        self._next = len(prompt) - 1
        self._last = self._next + n_predict if n_predict >= 0 else None
        self._groups: list[_Group] = []
        self._softmax.clear()

    def see(self, slot: Slot, chosen: Sequence[int], index: int) -> None:
        """Take what a verification gave: ``chosen`` follows ``slot.id_last``.

        ``index`` is where the slot's tokens begin in the target's batch, whose logits and rows are
        still there.
        """
        if not self._tokens:
            return
        start = perf_counter_ns()
        target, row, first = self._target, self._row, slot.n_past
        for i in range(max(self._next - first, 0), len(chosen)):
            logits = target.logits_address(index + i)
            row.read_at(logits, target.n_vocab, self._n_vocab)
            self._softmax[first + i] = (row.lse, not row.n_nan)
            self._logits[first + i] = logits
            self._before[first + i] = target.nextn_address(index + i - 1) if i else slot.row
        self._tokens += chosen
        while self._probe_next(len(self._tokens) - 1 - self.depth, self._at_once):
            pass
        self.ns += perf_counter_ns() - start

    def finish(self) -> Probed:
        """Probe the rest of the text, which has ended, and return what was found in all of it."""
        start = perf_counter_ns()
        while self._probe_next(len(self._tokens) - 2, 1):
            pass
        self._tokens = []
        probed = _joined(self._groups, self.depth, self.width)
        self.ns += perf_counter_ns() - start
        return probed

    def _probe_next(self, last: int, least: int) -> bool:
        """Probe a group of roots up to position ``last`` if there are ``least`` of them."""
        if self._last is not None:
            last = min(last, self._last)
        roots = range(self._next, last + 1, self.every)[: self._at_once]
        if len(roots) < least:
            return False
        self._probe(roots)
        self._next = roots[-1] + self.every
        for position in [position for position in self._softmax if position < self._next]:
            del self._softmax[position]
        return True

    def _probe(self, roots: Sequence[int]) -> None:
        head, memory, batch = self._head, self._head.memory, self._head.batch
        group = _Group(roots, self.depth)
        self._groups.append(group)
        self._beams = [Beams(self.width) for _ in roots] if self.width else []
        self._free, self._ended = self._paths[::-1], []
        batch.clear()
        going: list[tuple[_Path, int]] = []
        for i, root in enumerate(roots):
            if self.width:
                group.expand(i, [(0, 0)])
            if not root and memory is not head.context:
                continue  # this head reads the target's cells, and there are none
            path = self._free.pop()
            path.root, path.node, path.true = i, 0, True
            path.n_past, path.id_last, path.draft = root, self._tokens[root], []
            path.keep_row(self._before[root])
            if root:
                memory.seq_cp(0, path.seq, 0, root)
            going.append((path, head.feed(path, path.id_last, path.row)))
        for step in range(self.depth):
            if not going:
                break
            head.step([path for path, _ in going], step)
            for path, output in going:
                self._look(path, step, head.context.logits_address(output))
            batch.clear()
            fed: list[tuple[_Path, int]] = []
            for root, paths in groupby(going, key=lambda one: one[0].root):
                here = list(paths)
                children = self._children(root, step, [path for path, _ in here])
                self._ended += [path for path, _ in here if path not in children]
                for path, output in here:
                    for one in self._branches(path, children.get(path, [])):
                        hidden = head.hidden(output, step)
                        fed.append((one, head.feed(one, one.draft[-1], hidden)))
            going = fed
        for path in set(self._paths).difference(self._free):
            memory.seq_rm(path.seq)

    def _look(self, path: _Path, step: int, logits: int) -> None:
        """Keep what a step gave."""
        row, group = self._row, self._groups[-1]
        row.read_at(logits, self._head.context.n_vocab, self._n_vocab)
        group.keep(row, path, step)
        if path.node is not None:
            path.offered = [row.id(r) for r in range(1, min(self.width, RANKS) + 1)] or [row.best]
        if path.true:
            at = path.n_past + 1 + step
            path.rank = group.rank[path.root, step] = row.rank_of(self._tokens[at])
            group.overlap[path.root, step] = self._overlap(at - 1, logits)

    def _children(self, root: int, step: int, paths: Sequence[_Path]) -> dict[_Path, list[_Child]]:
        """Return how the drafts of a root go on; those that end are left out."""
        children: dict[_Path, list[_Child]] = {}
        if step + 1 == self.depth:
            return children
        for path in paths:
            at = path.n_past + 1 + step
            path.true = path.true and path.rank > 0 and at + 1 < len(self._tokens)
        by_node = {path.node: path for path in paths}
        for node, (parent, rank) in enumerate(self._next_nodes(root, step, by_node.get(0))):
            path = by_node[parent]
            child = _Child(node, path.offered[rank - 1], path.true and rank == path.rank)
            children.setdefault(path, []).insert(0, child)
        for path in paths:
            if path.true and not any(child.true for child in children.get(path, ())):
                truth = self._tokens[path.n_past + 1 + step]
                children.setdefault(path, []).insert(0, _Child(None, truth, True))
        return children

    def _next_nodes(self, root: int, step: int, greedy: _Path | None) -> list[tuple[int, int]]:
        """Return the beams' nodes of the next depth: index of the parent, rank."""
        if not self.width:
            return [(0, 1)] if greedy is not None and greedy.offered[0] >= 0 else []
        layers = self._groups[-1].layers[root]
        if len(layers) <= step:
            return []  # the beams have ended
        nodes = self._beams[root].grow(layers[step][1])
        self._groups[-1].expand(root, nodes)
        return nodes

    def _branches(self, path: _Path, children: Sequence[_Child]) -> list[_Path]:
        """Return the children as drafts; the last one goes on in the path's own sequence."""
        drafts = [self._fork(path) for _ in children[1:]] + [path] * bool(children)
        for one, child in zip(drafts, children, strict=True):
            one.node, one.true = child.node, child.true
            one.draft.append(child.token)
        return drafts

    def _fork(self, path: _Path) -> _Path:
        if not self._free:
            for ended in self._ended:
                self._head.memory.seq_rm(ended.seq)
            self._free, self._ended = self._ended, []
        other = self._free.pop()
        other.root = path.root
        self._head.fork(path, other)
        return other

    def _overlap(self, position: int, logits: int) -> float:
        """Sum of min(p_target, p_head) for the token after ``position``."""
        lse, clean = self._softmax[position]
        row = self._row
        return overlap_at(
            self._logits[position], lse, logits, row.lse, self._n_vocab, clean and not row.n_nan
        )
