"""Drafts for a collector, and the counters to expect of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtpstats.stats import Collector, Snapshot

VOCAB = 30


def row(*order: int, vocab: int = VOCAB) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits that put these tokens first, in this order, then the rest by id."""
    logits = -0.5 * np.arange(vocab, dtype=np.float32) - 10
    logits[list(order)] = -0.25 * np.arange(len(order), dtype=np.float32)
    return logits


def feed(c: Collector, n_past: int, id_last: int, *bests: int, seq: int = 0) -> None:
    """A draft whose candidates are best, best + 1, ..., best + 7 at each position."""
    c.draft(seq, n_past, id_last)
    for i, best in enumerate(bests):
        c.candidates(seq, i, row(*range(best, best + 8)))


def counts(s: Snapshot, n: int = 4) -> dict[str, list[int]]:
    return {k: getattr(s, k)[:n].tolist() for k in ("drafted", "reached", "accepted")}


def expected(**values: int) -> Snapshot:
    s = Snapshot()
    for name, value in values.items():
        setattr(s, name, value)
    return s
