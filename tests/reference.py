"""The core in plain Python, written from the definitions and for clarity, to test against.

Nothing here shares code with the package. Rows are sequences of floats (of float32 values).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

REASONS = ("n_max", "budget", "context", "end")


def best(row: Sequence[float], n: int = 10) -> list[tuple[int, float]]:
    """The n best finite logits as (id, logit): best first, equal ones by ascending id."""
    finite = [(i, v) for i, v in enumerate(row) if math.isfinite(v)]
    return sorted(finite, key=lambda c: (-c[1], c[0]))[:n]


def lse(values: Sequence[float]) -> float:
    """Log-sum-exp over the finite values, summed without error; -inf if there are none."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return -math.inf
    top = max(finite)
    return top + math.log(math.fsum(math.exp(v - top) for v in finite))


def overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """Sum of the lesser probability of each token; what is not finite in either row is none."""
    full_a, full_b = lse(a), lse(b)
    if math.inf in (abs(full_a), abs(full_b)):
        return math.nan
    return math.fsum(
        math.exp(min(x - full_a, y - full_b))
        for x, y in zip(a, b, strict=True)
        if math.isfinite(x) and math.isfinite(y)
    )


def bad(row: Sequence[float]) -> int:
    """NaN and +inf entries."""
    return sum(math.isnan(v) or v == math.inf for v in row)


def padded(row: Sequence[float], n_vocab: int) -> bool:
    """Whether the row's best finite logit lies at or after n_vocab."""
    found = best(row, 1)
    return bool(found) and found[0][0] >= n_vocab


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) of a seed and a text position: two rounds of splitmix64's mixing."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    step = 0x9E3779B97F4A7C15
    x = mix((seed + step) & mask)
    x = mix((x + (position + 1) * step) & mask)
    return (x >> 11) / 2**53


def sample(
    row: Sequence[float], temp: float, top_k: int, top_p: float, min_p: float, u: float
) -> tuple[int, float]:
    """(token, margin) of a draw: top_k, top_p, min_p, temperature, in that order."""
    order = best(row, len(row))
    if not order:
        return -1, 0.0
    if temp <= 0:
        return order[0][0], order[0][1] - order[1][1] if len(order) > 1 else math.inf
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        weights = [math.exp(v - order[0][1]) for _, v in order]
        total, running = math.fsum(weights), 0.0
        for i, w in enumerate(weights):
            running += w
            if running >= top_p * total:
                order = order[: i + 1]
                break
    if min_p > 0:
        least = order[0][1] + math.log(min_p)
        order = [c for i, c in enumerate(order) if i == 0 or c[1] >= least]
    weights = [math.exp((v - order[0][1]) / temp) for _, v in order]
    total, low = math.fsum(weights), 0.0
    for (token, _), w in zip(order, weights, strict=True):
        high = low + w
        if high > u * total or token == order[-1][0]:
            return token, max(0.0, min(u - low / total, high / total - u))
        low = high
    raise AssertionError


def units(p: float) -> int:
    """A probability rounded to a multiple of 2**-24."""
    return math.floor(min(p, 1.0) * 2**24 + 0.5)


@dataclass
class Draft:
    n_past: int
    id_last: int
    seen: list[list[tuple[int, float, float]]] = field(default_factory=list)
    """By position: (id, p, p over the 10 best) of up to 8 candidates."""
    sent: list[int] | None = None
    reason: str = "n_max"
    stop: int | None = None
    dropped: bool = False
    broken: bool = False
    replay: list[int] | None = None


def zeros() -> dict[str, Any]:
    """The counters under the names of the result file, sums in units of 2**-24."""
    per_position = ("drafted", "reached", "accepted", "miss")
    single = (
        "verifications discarded unresolved invalid dropped_drafts dropped_tokens cut_tokens"
        " padded_rows nan_rows beyond_drafted beyond_reached beyond_accepted"
    )
    stops = ("stopped", "stopped_hit", "stopped_reached")
    return {
        **{name: [0] * 16 for name in (*per_position, *stops)},
        **{name: [[0] * 8 for _ in range(16)] for name in ("rank", "sum_p", "sum_p_top10")},
        **{
            name: [[[0, 0] for _ in range(10)] for _ in range(16)]
            for name in ("calib_p1", "calib_p2")
        },
        "censored": [[0] * 16 for _ in range(4)],
        **dict.fromkeys(single.split(), 0),
    }


class Collector:
    """One sequence. It is told the same calls as mtpstats.Collector, legal ones only."""

    def __init__(self) -> None:
        self.counts = zeros()
        self.open: Draft | None = None

    def begin(self) -> None:
        self.finish(None, None)

    def finish(self, n_past: int | None, id_last: int | None) -> None:
        if self.open is None:
            return
        if n_past is not None and id_last is not None:
            self._resolve(n_past, id_last)
        elif self.open.broken:
            self.counts["invalid"] += 1
        else:
            self.counts["unresolved"] += 1
        self.open = None

    def draft(self, n_past: int, id_last: int) -> None:
        if self.open is not None:
            self._resolve(n_past, id_last)
        self.open = Draft(n_past, id_last)

    def candidates(self, row: Sequence[float], n_vocab: int | None = None) -> None:
        assert self.open is not None
        n_vocab = len(row) if n_vocab is None else n_vocab
        if len(self.open.seen) >= 16:
            self.open.seen.append([])
            return
        tokens = row[:n_vocab]
        top = best(tokens, 10)
        full, ten = lse(tokens), lse([v for _, v in top])
        self.open.seen.append([(i, math.exp(v - full), math.exp(v - ten)) for i, v in top[:8]])
        self.open.broken |= not top
        self.counts["nan_rows"] += bad(tokens) > 0
        self.counts["padded_rows"] += padded(row, n_vocab)

    def stop(self) -> None:
        assert self.open is not None
        self.open.stop = len(self.open.seen) - 1

    def verify(self, tokens: list[int], reason: str) -> None:
        assert self.open is not None
        if self.open.sent is not None:
            self.open.replay = tokens
            return
        self.counts["cut_tokens"] += self._planned() - len(tokens)
        self.open.sent, self.open.reason = tokens, reason

    def drop(self) -> None:
        assert self.open is not None
        planned = self._planned()
        if planned:
            self.open.dropped = True
            self.counts["dropped_drafts"] += 1
            self.counts["dropped_tokens"] += planned

    def invalid(self) -> None:
        self.open = None
        self.counts["invalid"] += 1

    def _planned(self) -> int:
        assert self.open is not None
        if self.open.dropped:
            return 0
        return len(self.open.seen) - (self.open.stop is not None)

    def _resolve(self, n_past: int, id_last: int) -> None:
        d, c = self.open, self.counts
        assert d is not None
        if d.broken:
            c["invalid"] += 1
            return
        accepted = n_past - d.n_past - 1
        if d.sent is None:
            tokens = [s[0][0] if s else None for s in d.seen[: self._planned()]]
        else:
            tokens = list(d.sent)
        if d.replay is not None:
            agree = 0
            for a, b in zip(d.replay, tokens, strict=False):
                if a != b:
                    break
                agree += 1
            if agree < len(d.replay):
                if accepted != len(d.replay):
                    c["discarded"] += 1
                    return
                accepted, id_last = agree, d.replay[agree]
        if not 0 <= accepted <= len(tokens):
            c["discarded"] += 1
            return
        ended = accepted < len(tokens) and tokens[accepted] == id_last
        if ended:
            accepted += 1
            tokens = tokens[:accepted]
        c["verifications"] += 1
        for i, token in enumerate(tokens):
            reached, hit = i <= accepted, i < accepted
            if i >= 16:
                c["beyond_drafted"] += 1
                c["beyond_reached"] += reached
                c["beyond_accepted"] += hit
                continue
            c["drafted"][i] += 1
            c["reached"][i] += reached
            c["accepted"][i] += hit
            if reached:
                self._choice(i, d.seen[i], token if hit else id_last)
        n = len(tokens)
        if d.dropped:
            return
        if d.stop is not None and n == d.stop and not ended:
            if n < 16:
                c["stopped"][n] += 1
                if accepted == n:
                    c["stopped_reached"][n] += 1
                    c["stopped_hit"][n] += d.seen[n][0][0] == id_last
        elif accepted == n < 16 and (n or d.sent is not None):
            c["censored"][REASONS.index("end" if ended else d.reason)][n] += 1

    def _choice(self, i: int, seen: list[tuple[int, float, float]], choice: int | None) -> None:
        c = self.counts
        ids = [s[0] for s in seen]
        if choice in ids:
            c["rank"][i][ids.index(choice)] += 1
        else:
            c["miss"][i] += 1
        for r, (token, p, p10) in enumerate(seen):
            c["sum_p"][i][r] += units(p)
            c["sum_p_top10"][i][r] += units(p10)
            if r < 2:
                decile = c[("calib_p1", "calib_p2")[r]][i][min(9, units(p) * 10 // 2**24)]
                decile[0] += 1
                decile[1] += token == choice
