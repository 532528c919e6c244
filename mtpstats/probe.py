"""Probes: what the head would draft at every root of a text, found while the text is made.

A probe of root ``t`` is a sequence of its own in the memory the head attends to. It shares the
true text before ``t`` and goes on with a draft. The greedy path is fed with the head's own best
tokens, the forced path with the true ones; they are one draft up to the first rank that is not 1,
where a second sequence takes over the forced path. Many roots go through the head in one batch, a
step of all of them at a time. The ordinary driver makes the text, and nothing of it is decoded
twice (DESIGN section 4).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from mtpstats._core import Row, copy, overlap_at
from mtpstats.head import Head, Slot
from mtpstats.llama import Context
from mtpstats.trace import RANKS, UNKNOWN

WIDTH = 32
"""Roots probed together."""
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


class _Group:
    """What is found at roots that are probed together; ``kept`` rows are ``Row.fill``'s."""

    def __init__(self, roots: Sequence[int], depth: int) -> None:
        n = len(roots)
        self.roots, self.depth = list(roots), depth
        self.rank = np.full((n, depth), UNKNOWN, np.uint8)
        self.overlap = np.full((n, depth), np.nan, np.float32)
        self.kept = np.full((n * depth, KEPT), np.nan, np.float32)
        self.off_kept = np.empty((n * depth, KEPT), np.float32)
        self.off_index: list[int] = []
        self._kept_at, self._off_at = self.kept.ctypes.data, self.off_kept.ctypes.data

    def keep(self, row: Row, root: int, step: int, greedy: bool) -> None:
        """Keep a row of logits of a root of the group."""
        index = root * self.depth + step
        if greedy:
            row.fill(self._kept_at + 4 * KEPT * index)
        else:
            row.fill(self._off_at + 4 * KEPT * len(self.off_index))
            self.off_index.append(index)


def _joined(groups: Sequence[_Group], depth: int) -> Probed:
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
    )


class _Path(Slot):
    """A draft at a root, the ``root``-th of its group; ``true`` as long as it is the text's."""

    def __init__(self, seq: int, row_bytes: int, root: int, greedy: bool) -> None:
        super().__init__(seq, row_bytes)
        self.root, self.greedy, self.true = root, greedy, True


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
        width: roots probed together. More are faster until a batch of ``2 * width`` tokens is
            bound by arithmetic.

    Once there is a driver ``depth`` is the one in force, and ``head_kind`` and ``n_blocks`` say
    what the head is. ``ns`` counts the nanoseconds spent here.
    """

    def __init__(self, depth: int, every: int = 1, width: int = WIDTH) -> None:
        self.depth, self.every, self.width = depth, every, width
        self.ns = 0
        self.head_kind, self.n_blocks = "single", 1
        self._tokens: list[int] = []

    @property
    def n_sequences(self) -> int:
        """Sequences it needs beside the text's, from 1 on, in the memory the head attends to."""
        return 2 * self.width

    @property
    def n_cells(self) -> int:
        """Cells it needs beside the text's, unless the head reads the target's."""
        return 2 * self.width * self.depth

    def context(self) -> dict[str, Any]:
        """Options of the context whose cells the head attends to."""
        return {"n_seq_max": 1 + self.n_sequences, "kv_unified": True, "swa_full": True}

    def attach(self, target: Context, head: Head, n_vocab: int) -> None:
        """Work on these contexts; the text is in their sequence 0."""
        self._target, self._head, self._n_vocab = target, head, n_vocab
        if head.deepest is not None:
            self.depth = min(self.depth, head.deepest)
        row_bytes = 4 * target.n_embd_out
        width = self.width
        self._paths = [_Path(1 + i, row_bytes, i, True) for i in range(width)]
        self._forks = [_Path(1 + width + i, row_bytes, i, False) for i in range(width)]
        self.head_kind, self.n_blocks = head.kind, head.context.model.n_layer_nextn
        # Tokens of a path in one batch: a chain decodes all of its draft again.
        n_tokens = 1 if head.deepest is None else self.depth
        fitting = head.context.n_batch // (2 * n_tokens)
        affordable = MAX_LOGITS // (4 * n_vocab) // self.every
        self._at_once = max(1, min(width, fitting, affordable))
        # The roots of a group, the depth behind the last one, and what a verification adds.
        capacity = self._at_once * self.every + self.depth + head.n_max + 1
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
        probed = _joined(self._groups, self.depth)
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
        self._groups.append(_Group(roots, self.depth))
        batch.clear()
        going: list[tuple[_Path, int]] = []
        for path, root in zip(self._paths, roots, strict=False):
            path.n_past, path.id_last = root, self._tokens[root]
            path.draft, path.true = [], True
            path.keep_row(self._before[root])
            if root:
                memory.seq_cp(0, path.seq, 0, root)
            elif memory is not head.context:
                continue  # this head reads the target's cells, and there are none
            going.append((path, head.feed(path, path.id_last, path.row)))
        used = [path for path, _ in going]
        for step in range(self.depth):
            if not going:
                break
            head.step([path for path, _ in going], step)
            logits = [head.context.logits_address(output) for _, output in going]
            batch.clear()
            fed: list[tuple[_Path, int]] = []
            for (path, output), address in zip(going, logits, strict=True):
                for one, token in self._look(path, step, address):
                    if one is not path:
                        head.fork(path, one)
                        used.append(one)
                    one.draft.append(token)
                    fed.append((one, head.feed(one, token, head.hidden(output, step))))
            going = fed
        for path in used:
            memory.seq_rm(path.seq)

    def _look(self, path: _Path, step: int, logits: int) -> list[tuple[_Path, int]]:
        """Keep what a step gave; return the paths that go on, a fork first, and their tokens."""
        tokens, row, group = self._tokens, self._row, self._groups[-1]
        row.read_at(logits, self._head.context.n_vocab, self._n_vocab)
        group.keep(row, path.root, step, path.greedy)
        going = [(path, row.best)] if row.best >= 0 else []
        if path.true:
            at = path.n_past + 1 + step
            truth = tokens[at]
            rank = row.rank_of(truth)
            group.rank[path.root, step] = rank
            group.overlap[path.root, step] = self._overlap(at - 1, logits)
            follows = rank > 0 and at + 1 < len(tokens)
            if not path.greedy:
                going = [(path, truth)] if follows else []
            elif rank != 1 or not follows:
                path.true = False
                if follows:
                    going.insert(0, (self._forks[path.root], truth))
        return going if step + 1 < self.depth else []

    def _overlap(self, position: int, logits: int) -> float:
        """Sum of min(p_target, p_head) for the token after ``position``."""
        lse, clean = self._softmax[position]
        row = self._row
        return overlap_at(
            self._logits[position], lse, logits, row.lse, self._n_vocab, clean and not row.n_nan
        )
