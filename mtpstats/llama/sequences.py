"""The sequences in a context's memory, and how far each can be trusted to be cut or copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mtpstats.errors import InputError

if TYPE_CHECKING:
    from mtpstats.llama.batch import Batch
    from mtpstats.llama.functions import Functions
    from mtpstats.llama.handle import Handle
    from mtpstats.llama.model import Model


class Sequences:
    """The memory operations of a ``Context``.

    Attention memory can be cut anywhere. Recurrent memory holds one state per sequence and, with
    ``n_rs_seq``, the states after each of the last tokens of its last ubatch; asked for more,
    libllama answers yes and goes on from a wrong state. What is still there is counted here.
    """

    model: Model
    n_seq_max: int
    n_rs_seq: int
    n_ubatch: int
    kv_unified: bool
    _fn: Functions
    _handle: Handle
    _memory: int
    _recurrent: bool
    _whole_sequences: bool
    _next: list[int]

    def _start_tracking(self, shared: Sequences | None) -> None:
        # Per sequence: the next position (the target's own where its memory is shared), tokens
        # that may be taken back, a rollback that no decode has used yet.
        self._next = shared._next if shared is not None else [0] * self.n_seq_max
        self._room: dict[int, int] = {}
        self._pending: dict[int, int] = {}

    @property
    def rollback(self) -> str:
        """What ``seq_rm`` can take back: "any", "snapshots" (n_rs_seq tokens), or "none"."""
        if not self._recurrent:
            return "any"
        return "snapshots" if self.n_rs_seq else "none"

    def _note_snapshots(self, batch: Batch) -> None:
        # llama.cpp keeps the last n_rs_seq + 1 tokens a sequence has in the batch in one ubatch,
        # and a snapshot of each. A later ubatch of two or more sequences may move the cell of one
        # that is not in it, and its snapshots stay behind; only the order of cells would tell. So
        # a tail counts only until such a ubatch may have run.
        spans = batch.spans
        for seq in spans:
            self._pending.pop(seq, None)
        if len(spans) == 1:
            ((seq, (first, last)),) = spans.items()
            self._room[seq] = min(self.n_rs_seq, last - first)
            return
        self._room = {}
        if batch.coupled:
            return
        lengths = {last - first for first, last in spans.values()}
        if len(lengths) > 1 or batch.n_tokens > self.n_ubatch:
            return
        room = min(self.n_rs_seq, lengths.pop())
        # One ubatch with kv_unified; without, one per run of ids that rise by one.
        rest, runs = list(spans), []
        while rest:
            run = [rest[0]] if not self.kv_unified else rest
            for seq in rest[1:] if not self.kv_unified else ():
                if seq == run[-1] + 1:
                    run.append(seq)
            runs.append(run)
            rest = [seq for seq in rest if seq not in run]
        for run in reversed(runs):
            self._room.update(dict.fromkeys(run, room))
            if len(run) > 1:
                return

    def groups(self, lengths: Mapping[int, int]) -> list[list[int]]:
        """Split sequences into those one batch may hold if all are to be rolled back after it.

        ``lengths`` maps sequences to their numbers of tokens. One group where memory can be cut
        anywhere. On recurrent memory sequences share a batch only if they are equally long, have
        consecutive ids unless ``kv_unified``, and fit into one ubatch; a group must be rolled back
        before the next is decoded. llama.cpp makes the same ubatches of it, and no more of them.
        """
        if not self._recurrent or not self.n_rs_seq:
            return [list(lengths)]
        found: list[list[int]] = []
        for seq in sorted(lengths, key=lambda seq: (lengths[seq], seq)):
            group = found[-1] if found else []
            if (
                group
                and lengths[group[-1]] == lengths[seq]
                and (self.kv_unified or seq == group[-1] + 1)
                and (len(group) + 1) * lengths[seq] <= self.n_ubatch
            ):
                group.append(seq)
            else:
                found.append([seq])
        return found

    def _resync(self, sequences: Iterable[int], untouched: bool) -> None:
        # After a failure in the middle of a batch only the memory itself knows how far it got, and
        # a recurrent state may be that of any of its tokens.
        if self._handle.ptr is None:
            return
        for seq in sequences:
            if self._recurrent and not untouched:
                self.seq_rm(seq)
            self._next[seq] = self._fn.llama_memory_seq_pos_max(self._memory, seq) + 1
            self._room.pop(seq, None)

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove positions ``p0 <= p < p1``; negative means from the start, to the end.

        On recurrent memory a tail of at most ``rollback_room(seq)`` tokens can be taken back, once
        after each decode; with a sliding window, as much as leaves the window whole. Raises
        InputError for more than that, which libllama would either refuse or do wrong without a
        word.
        """
        self._check_seq(seq)
        end = self._next[seq]
        whole = p0 <= 0 and (p1 < 0 or p1 >= end)
        tail = not whole and p0 < end and (p1 < 0 or p1 >= end)
        if whole:
            p0 = p1 = -1
        elif tail and self._recurrent:
            self._check_rollback(seq, end - p0)
        elif tail and self.model.n_swa:
            self._check_window(seq, p0)
        self._fn.llama_memory_seq_rm(self._memory, seq, p0, p1)
        if whole:
            self._room.pop(seq, None)
            self._pending.pop(seq, None)
        elif tail and self._recurrent:
            self._pending[seq] = end - p0
            self._room.pop(seq, None)
        elif tail:
            self._next[seq] = max(p0, 0)
            return
        self._next[seq] = self._fn.llama_memory_seq_pos_max(self._memory, seq) + 1

    def rollback_room(self, seq: int = 0) -> int:
        """Return how many of its last tokens ``seq_rm`` can take back from the sequence now."""
        self._check_seq(seq)
        if not self._recurrent:
            return self._next[seq]
        return self._room.get(seq, 0)

    def _check_rollback(self, seq: int, tokens: int) -> None:
        room = self._room.get(seq, 0)
        if tokens <= room:
            return
        why = (
            f"{self.model.arch} without snapshots cannot take tokens back"
            if not self.n_rs_seq
            else "it was rolled back already since its last decode"
            if seq in self._pending
            else f"n_rs_seq is {self.n_rs_seq}, a rollback ends inside the last batch, and only "
            "sequences of equal length can be decoded together before one"
        )
        raise InputError(
            f"sequence {seq} can take back {room} of its last tokens, not {tokens}: {why}"
        )

    def _check_window(self, seq: int, end: int) -> None:
        # Cells that left the window were given to later tokens.
        oldest = self._fn.llama_memory_seq_pos_min(self._memory, seq)
        if oldest > max(0, end - self.model.n_swa + 1):
            raise InputError(
                f"sequence {seq} cannot end at position {end}: its sliding window of "
                f"{self.model.n_swa} would begin before position {oldest}, the first in memory"
            )

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let ``dst`` share positions ``p0 <= p < p1`` of ``src``.

        Without ``kv_unified`` only whole sequences, which replace ``dst``; with it ``dst`` must
        hold none of these positions. On recurrent memory neither may have a rollback
        that no decode has used yet, unless both have the same one; afterwards neither can be rolled
        back before its next decode. Raises InputError.
        """
        self._check_seq(src)
        self._check_seq(dst)
        if src == dst:
            return
        if not self.kv_unified or self._whole_sequences:
            if p0 > 0 or 0 <= p1 < self._next[src]:
                why = self.model.arch if self.kv_unified else "without kv_unified"
                raise InputError(f"{why}: only whole sequences can be copied")
            p0 = p1 = -1
        overlap = max(p0, 0) < self._next[dst] and (p1 < 0 or p1 > self.seq_pos_min(dst))
        if self.kv_unified and overlap:
            # libllama would keep both, each position twice.
            raise InputError(f"sequence {dst} is not empty there: remove its positions first")
        if self._recurrent and self._pending.get(src) != self._pending.get(dst):
            raise InputError(
                f"sequence {src if src in self._pending else dst} was rolled back and not decoded "
                "since: its copy would be of the state before the rollback"
            )
        self._fn.llama_memory_seq_cp(self._memory, src, dst, p0, p1)
        # Both now share one recurrent cell, and a rollback would move its position for both.
        self._room.pop(src, None)
        self._room.pop(dst, None)
        self._next[dst] = self._fn.llama_memory_seq_pos_max(self._memory, dst) + 1

    def seq_keep(self, seq: int) -> None:
        """Remove every other sequence."""
        self._check_seq(seq)
        # llama_memory_seq_keep leaves stale rollbacks behind, and other streams untouched.
        for one in range(self.n_seq_max):
            if one != seq:
                self.seq_rm(one)

    def seq_pos_min(self, seq: int = 0) -> int:
        """Return the lowest position of the sequence in memory, -1 if it is empty."""
        self._check_seq(seq)
        return int(self._fn.llama_memory_seq_pos_min(self._memory, seq))

    def seq_pos_max(self, seq: int = 0) -> int:
        """Return the highest position of the sequence in memory, -1 if it is empty."""
        self._check_seq(seq)
        return int(self._fn.llama_memory_seq_pos_max(self._memory, seq))

    def clear(self) -> None:
        """Forget every sequence and zero the memory."""
        self._handle.get()
        self._fn.llama_memory_clear(self._memory, True)
        self._next[:] = [0] * self.n_seq_max
        self._room.clear()
        self._pending.clear()

    def _check_seq(self, seq: int) -> None:
        self._handle.get()
        if not 0 <= seq < self.n_seq_max:
            raise InputError(f"sequence {seq}; n_seq_max is {self.n_seq_max}")
