"""The collector against a plain-Python reference, on drafts by chance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpstats.stats import Collector, Snapshot


def pool() -> list[tuple[list[float], int | None]]:
    """Rows (and vocabulary sizes) with ties, NaN, infinities, padding, few tokens."""
    rng = np.random.default_rng(11)
    rows: list[tuple[list[float], int | None]] = [
        ([math.nan, math.inf, -math.inf], None),
        ([1.0, 1.0, 1.0, 9.0], 3),
        ([5.0], None),
    ]
    for n in (2, 3, 7, 8, 9, 10, 11, 14, 14, 14, 14, 14, 14):
        row = np.round(rng.normal(0, 2, n), 1).astype(np.float32)
        row[rng.integers(0, n)] = rng.choice([np.nan, np.inf, -np.inf, 0, 0, 0, 4])
        rows.append((row.tolist(), None if rng.random() < 0.7 else int(rng.integers(1, n + 1))))
    return rows


POOL = pool()


class Script:
    """Decisions read off a list of numbers, which Hypothesis shortens and lowers."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def pick(self, *choices: Any) -> Any:
        return choices[self.numbers.pop() % len(choices)] if self.numbers else choices[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=250))
def test_collector_equals_the_reference(numbers: list[int]) -> None:
    script = Script(numbers)
    c = Collector()
    references = {seq: reference.Collector() for seq in (0, 5, 70_000)}
    while script.numbers:
        seq = script.pick(0, 5, 70_000)
        r = references[seq]
        n_past = 0 if r.open is None else r.open.n_past
        n_past = max(0, n_past + script.pick(1, 2, 3, 1, 2, 3, 4, 5, 6, 0, -1, 19, 18))
        id_last = script.pick(*range(14))
        how = script.pick(*["draft"] * 12, "begin", "finish", "end", "invalid")
        if how == "begin":
            c.begin(seq)
            r.begin()
        elif how == "finish":
            c.finish(seq)
            r.finish(None, None)
        elif how == "end":
            c.finish(seq, n_past, id_last)
            r.finish(n_past, id_last)
        elif how == "invalid" and r.open is not None:
            c.invalid(seq)
            r.invalid()
        elif how == "draft":
            c.draft(seq, n_past, id_last)
            r.draft(n_past, id_last)
            _one_draft(script, c, r, seq)
    for seq, r in references.items():
        check_same(c.snapshot(seq), r.counts)
    assert c.snapshot() == Snapshot.merge(*(c.snapshot(seq) for seq in references))


def _one_draft(script: Script, c: Collector, r: reference.Collector, seq: int) -> None:
    length = script.pick(3, 2, 1, 0, 4, 5, 18)
    for i in range(length):
        logits, n_vocab = POOL[-1] if i > 5 else script.pick(*reversed(POOL))
        c.candidates(seq, i, np.array(logits, np.float32), n_vocab)
        r.candidates(logits, n_vocab)
    if length and script.pick(False, False, True):
        c.stop(seq, length - 1)
        r.stop()
    then = script.pick("nothing", "verify", "verify", "drop", "replay")
    planned = r._planned()
    if then == "drop":
        c.drop(seq)
        r.drop()
    elif then != "nothing":
        for _ in range(2 if then == "replay" else 1):
            cut = script.pick(0, 0, 0, 1, 2)
            tokens = [script.pick(*range(14)) for _ in range(planned - cut)]
            reason = script.pick(*reference.REASONS)
            c.verify(seq, tokens, reason)
            r.verify(tokens, reason)


def check_same(s: Snapshot, counts: dict[str, Any]) -> None:
    """Equal counters; a sum of probabilities may differ by one unit a term, where the kernel's
    1e-7 falls on the other side of a rounding, and so may a decile."""
    exact = {k: v for k, v in s.to_dict().items() if not k.startswith(("sum_", "calib_"))}
    assert exact == {k: counts[k] for k in exact}
    for name in ("sum_p", "sum_p_top10"):
        ours = getattr(s, f"{name}_units").astype(np.int64)
        terms = s.reached[:, None].astype(np.int64)
        assert (np.abs(ours - np.array(counts[name])) <= 8 * terms).all()
    for name in ("calib_p1", "calib_p2"):
        moved = np.abs(getattr(s, name).astype(np.int64) - np.array(counts[name])).sum(axis=1)
        assert (moved <= 2).all()
        assert moved.sum() % 2 == 0
