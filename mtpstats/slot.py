"""Slots: the sequences that texts are drafted and verified in."""

from __future__ import annotations

import ctypes

from mtpstats._core import copy
from mtpstats.generation import Generation


class Slot:
    """One text in the making, in a sequence of its own.

    ``n_past`` is the position at which ``id_last`` goes; ``row`` the address of the target's
    hidden row before it (float32[n_embd_out], owned here), zeros at position 0. For this round:
    ``draft``; ``n_steps``, how many tokens the head may propose; ``limit``, how many of them go to
    verification, and ``reason``, why no more.
    """

    def __init__(self, seq: int, row_bytes: int) -> None:
        self.seq = seq
        self._buffer = ctypes.create_string_buffer(row_bytes)
        self.row = ctypes.addressof(self._buffer)
        self.row_bytes = row_bytes
        self.n_past = 0
        self.id_last = -1
        self.draft: list[int] = []
        self.failed = False
        self.n_steps = 0
        self.limit = 0
        self.reason = "n_max"

    def keep_row(self, address: int) -> None:
        """Copy the row at ``address`` before a decode overwrites it."""
        copy(self.row, address, self.row_bytes)

    def plan(self, n_max: int, n_min: int, room: int, budget: int | None) -> None:
        """Decide how far to draft; ``room`` is left in the context, ``budget`` to be generated.

        As in llama.cpp a budget of 0 or less does not cut, and a draft is judged by ``n_min``
        before it is cut, so it may have to grow past the cut.
        """
        self.draft = []
        self.failed = False
        self.limit, self.reason = n_max, "n_max"
        if budget is not None and 0 < budget < self.limit:
            self.limit, self.reason = budget, "budget"
        if room < self.limit:
            self.limit, self.reason = max(room, 0), "context"
        self.n_steps = min(max(self.limit, n_min), room + 1) if self.limit else 0


class Text(Slot):
    """A slot and its text; ``index`` and ``n_rows`` say where it is in the target's batch.

    ``replays``: the draft is what was accepted of the last one, to be verified again.
    """

    def __init__(self, number: int, seq: int, row_bytes: int, n_predict: int) -> None:
        super().__init__(seq, row_bytes)
        self.number = number
        self.result = Generation()
        self.n_predict = n_predict
        self.n_done = 0
        self.index = 0
        self.n_rows = 0
        self.replays = False

    @property
    def sent(self) -> list[int]:
        """The tokens this round's target pass reads."""
        return [self.id_last, *self.draft]
