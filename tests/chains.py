"""A chain replayed from a recording in plain Python, written from llama.cpp's rules.

Nothing here shares code with the package's replay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

NEAR = 1e-2
"""Batch shape alone moves logits by up to about this much with F16 weights."""


@dataclass
class Chain:
    """``doubtful``: which verifications a near tie could have changed."""

    verifications: list[tuple[int, int]] = field(default_factory=list)
    doubtful: list[bool] = field(default_factory=list)


def replay(
    text: Any,
    *,
    n_max: int,
    p_min: float = 0.0,
    n_min: int = 0,
    n_predict: int = -1,
    n_ctx: int | None = None,
    heads: str = "single",
    sampled: bool = False,
) -> Chain:
    """Return the verifications of a live run over a ``TracedPrompt``, every root recorded."""
    n_ctx = text.n_ctx if n_ctx is None else n_ctx
    n, depth = len(text.tokens), text.rank.shape[1]
    first = t = text.n_prompt - 1
    out = Chain()
    while t < n - 1 or text.stop not in ("eog", "context", "nan"):
        room, n_done = n_ctx - t - 2, t - first
        if room < -1:
            break
        i = t - first
        limit = min(n_max, depth) if heads == "chain" else n_max
        if n_predict >= 0 and 0 < n_predict - n_done - 1 < limit:
            limit = n_predict - n_done - 1
        limit = max(min(limit, room), 0)
        steps = min(max(limit, n_min), room + 1) if limit else 0
        if heads == "shared" and t == 0:
            steps = limit = 0
        drafted, doubt = 0, False
        for d in range(steps):
            p = text.p[i, d]
            if math.isnan(p[0]):
                drafted = limit = 0
                break
            p10 = float(text.p_min_p[i, d])
            if p_min:
                doubt |= abs(math.log(p10 / p_min)) < NEAR
                if p10 < p_min:
                    break
            drafted += 1
            if not math.isnan(p[1]):
                doubt |= math.log(p[0] / p[1]) < 2 * NEAR if p[1] > 0 else False
        if drafted < n_min:
            drafted = 0
        drafted = min(drafted, limit)
        accepted = 0
        while accepted < drafted and text.rank[i, accepted] == 1:
            ends = t + 1 + accepted == n - 1 and text.stop == "eog"
            if ends and accepted + 1 < drafted:
                break
            accepted += 1
        chosen = accepted + 1
        margins = text.margin[t + 1 - text.n_prompt : t + 1 - text.n_prompt + chosen]
        doubt |= bool((margins < (1e-3 if sampled else NEAR)).any())
        out.verifications.append((drafted, accepted))
        out.doubtful.append(doubt)
        t += chosen
        if t >= n - 1 and text.stop == "eog":
            break
        if 0 <= n_predict < t - first:
            break
    return out
