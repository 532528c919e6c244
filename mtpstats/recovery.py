"""What becomes of the rejected tokens in the target's memory.

Most memory can be cut at the last accepted token. Where it cannot, the state before each
verification is kept in a spare sequence, and what was accepted is decoded again from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtpstats.llama import Batch, Context
from mtpstats.slot import Slot


class Cut:
    """Memory that gives tokens back."""

    def __init__(self, target: Context, n_slots: int = 1, batch: Batch | None = None) -> None:
        self._target = target

    def clear(self, slot: Slot) -> None:
        """Remove the slot's text."""
        self._target.seq_rm(slot.seq)

    def before(self, slots: Sequence[Slot]) -> None:
        """Prepare for a verification of these slots."""

    def keep(self, accepted: Sequence[tuple[Slot, Sequence[int]]]) -> None:
        """Leave of the last verification what was accepted.

        ``accepted`` holds slots whose draft was not accepted whole, ``n_past`` already past what
        was, and those tokens. Rows and logits of the verification are no longer readable.
        """
        for slot, _ in accepted:
            self._target.seq_rm(slot.seq, slot.n_past, -1)


class Replay(Cut):
    """Memory that gives nothing back: sequence ``seq + n_slots`` is the spare of ``seq``.

    Cheap with a unified KV cache, where a copied sequence is a mark on the cells, and a recurrent
    state is copied when one of the two goes on.
    """

    def __init__(self, target: Context, n_slots: int, batch: Batch) -> None:
        super().__init__(target)
        self._n_slots = n_slots
        self._batch = batch

    def clear(self, slot: Slot) -> None:
        """Remove the slot's text and its spare."""
        self._target.seq_rm(slot.seq)
        self._target.seq_rm(slot.seq + self._n_slots)

    def before(self, slots: Sequence[Slot]) -> None:
        """Copy each sequence that will be drafted for to its spare."""
        for slot in slots:
            if slot.draft:
                self._copy(slot.seq, slot.seq + self._n_slots)

    def restore(self, slot: Slot) -> None:
        """Go back to before the verification."""
        self._copy(slot.seq + self._n_slots, slot.seq)

    def keep(self, accepted: Sequence[tuple[Slot, Sequence[int]]]) -> None:
        """Go back and decode what was accepted again, all slots in one batch."""
        if not accepted:
            return
        self._batch.clear()
        for slot, tokens in accepted:
            self.restore(slot)
            self._batch.extend(tokens, slot.n_past - len(tokens), slot.seq)
        self._target.decode(self._batch)

    def _copy(self, source: int, to: int) -> None:
        self._target.seq_rm(to)
        self._target.seq_cp(source, to)


@dataclass(frozen=True)
class Memory:
    """What the target's context has to be, and what takes back the rejected tokens there.

    ``options``: of a context to make instead of one that just holds the texts, with ``n_cells``
    more cells and so many logits at a time.
    """

    recovery: Callable[[Context, int, Batch], Cut] = Cut
    options: dict[str, Any] = field(default_factory=dict)
    n_cells: int = 0
    n_outputs: int = 0


class Probes(Protocol):
    """What drafts in several sequences: the needs of the memory that the head attends to."""

    @property
    def n_sequences(self) -> int:
        """Sequences beside the texts'."""

    @property
    def n_cells(self) -> int:
        """Cells beside the texts', unless the head reads the target's."""

    def context(self) -> dict[str, Any]:
        """Options of the context."""
