"""How far a text is drafted for, by hand."""

from __future__ import annotations

import pytest

from mtpstats.slot import Slot


@pytest.mark.parametrize(
    ("n_max", "n_min", "room", "budget", "n_steps", "limit", "reason"),
    [
        (4, 0, 9, None, 4, 4, "n_max"),
        (4, 0, 9, 4, 4, 4, "n_max"),
        (4, 0, 9, 3, 3, 3, "budget"),
        (4, 0, 9, 1, 1, 1, "budget"),
        # Nothing more is asked for: llama.cpp drafts on.
        (4, 0, 9, 0, 4, 4, "n_max"),
        (4, 0, 9, -1, 4, 4, "n_max"),
        (4, 0, 4, None, 4, 4, "n_max"),
        (4, 0, 3, None, 3, 3, "context"),
        (4, 0, 0, None, 0, 0, "context"),
        (4, 0, -1, None, 0, 0, "context"),
        (4, 0, 2, 2, 2, 2, "budget"),
        (4, 0, 1, 2, 1, 1, "context"),
        # It is drafted as far as n_min asks, and cut afterwards.
        (4, 3, 9, 1, 3, 1, "budget"),
        (4, 3, 9, 4, 4, 4, "n_max"),
        (4, 3, 1, None, 2, 1, "context"),
        (4, 3, 0, None, 0, 0, "context"),
        (4, 3, -1, None, 0, 0, "context"),
    ],
)
def test_plan(
    n_max: int, n_min: int, room: int, budget: int | None, n_steps: int, limit: int, reason: str
) -> None:
    slot = Slot(0, 4)
    slot.draft, slot.failed, slot.reason = [1, 2], True, "budget"
    slot.plan(n_max, n_min, room, budget)
    assert (slot.n_steps, slot.limit, slot.reason) == (n_steps, limit, reason)
    assert (slot.draft, slot.failed) == ([], False)
