"""Traces made by hand and by chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import reference_replay

from mtpstats.replay import Replay
from mtpstats.trace import UNKNOWN, Trace, TracedPrompt, quantise, trace_header

P = (0.5, 0.25, 0.0625, 0.03125, 0.015625, 0.015625, 0.0078125, 0.00390625)
TOP10 = 0.9375
# Roots 0 to 7 of a text of 10 tokens, the first at position 1.
RANKS = [[1, 1, 2], [1, 2, 1], [2, 1, 0], [1, 0], [0], [1, 1, 1], [1, 1], [1]]


def prompt(
    ranks: list[list[int]],
    depth: int,
    *,
    n_prompt: int = 1,
    stop: str = "n_predict",
    **changes: Any,
) -> TracedPrompt:
    """A text by the ranks of each root, as far as known; one token more than roots.

    Every position has the candidates' probabilities P, ten best with TOP10, unless ``changes``.
    """
    n_roots = len(ranks)
    rank = np.full((n_roots, depth), UNKNOWN, np.uint8)
    for r, path in enumerate(ranks):
        rank[r, : len(path)] = path
    left = np.zeros(rank.shape, bool)
    left[:, 1:] = np.logical_or.accumulate(rank != 1, axis=1)[:, :-1]
    off = np.flatnonzero(left & (rank != UNKNOWN))
    n = n_prompt + n_roots
    fields: dict[str, Any] = {
        "id": "made",
        "category": None,
        "n_prompt": n_prompt,
        "stop": stop,
        "n_ctx": 1000,
        "seconds": 1.0,
        "tokens": np.arange(n),
        "margin": np.ones(n - n_prompt),
        "roots": n_prompt - 1 + np.arange(n_roots),
        "rank": rank,
        "p": np.tile(np.float32(P), (n_roots, depth, 1)),
        "top10": np.full((n_roots, depth), TOP10),
        "p_min_p": np.full((n_roots, depth), P[0] / TOP10),
        "off_index": off,
        "off_p": np.tile(np.float32(P), (len(off), 1)),
        "off_top10": np.full(len(off), TOP10),
        "overlap": np.where(rank == UNKNOWN, np.nan, 0.75),
    }
    return TracedPrompt(**{**fields, **changes})


def trace(*prompts: TracedPrompt, **header: Any) -> Trace:
    return Trace(trace_header(depth=prompts[0].depth, **header), prompts)


def text(**changes: Any) -> Trace:
    """The text of RANKS alone in a trace."""
    return trace(prompt(RANKS, depth=3, n_prompt=2, **changes))


def lists(found: Replay) -> list[list[tuple[int, int]]]:
    """Tokens drafted and accepted of each verification of each prompt."""
    return [[tuple(pair) for pair in one.verifications.tolist()] for one in found.prompts]


def by_chance(
    seed: int,
    *,
    depth: int = 4,
    n_generated: int = 30,
    n_prompt: int = 3,
    stop: str = "n_predict",
    every: int = 1,
    name: str = "chance",
    lean: float = 0.6,
    width: int = 0,
    few: float = 0.0,
) -> TracedPrompt:
    """A text whose ranks and probabilities mean nothing but are of the right form."""
    rng = np.random.default_rng(seed)
    n = n_prompt + n_generated
    roots = np.arange(n_prompt - 1, n - 1, every)
    shares = np.array([0.1, 0, 0.3, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05]) * (1 - lean)
    shares[1] = 1 - shares.sum()
    rank = rng.choice(9, (len(roots), depth), p=shares).astype(np.uint8)
    gone = np.logical_or.accumulate(rank == 0, axis=1)
    rank[:, 1:][gone[:, :-1]] = UNKNOWN
    rank[roots[:, None] + 1 + np.arange(depth) >= n] = UNKNOWN
    left = np.zeros(rank.shape, bool)
    left[:, 1:] = np.logical_or.accumulate(rank != 1, axis=1)[:, :-1]
    off = np.flatnonzero(left & (rank != UNKNOWN)).astype(np.int32)

    def candidates(*shape: int) -> Any:
        drawn = np.sort(rng.dirichlet(np.full(11, 0.3), shape), axis=-1)[..., ::-1]
        return quantise(drawn[..., :8]), drawn[..., :10].sum(axis=-1)

    p, top10 = candidates(len(roots), depth)
    off_p, off_top10 = candidates(len(off))
    overlap = np.where(rank == UNKNOWN, np.nan, rng.random(rank.shape))
    return TracedPrompt(
        id=name,
        category="odd" if seed % 2 else None,
        n_prompt=n_prompt,
        stop=stop,
        n_ctx=1000,
        seconds=0.25,
        tokens=rng.integers(0, 1000, n).astype(np.int32),
        margin=rng.uniform(0.5, 5, n_generated).astype(np.float32),
        roots=roots.astype(np.int32),
        rank=rank,
        p=p,
        top10=top10.astype(np.float32),
        p_min_p=(p[:, :, 0] / top10).astype(np.float32),
        off_index=off,
        off_p=off_p,
        off_top10=off_top10.astype(np.float32),
        overlap=overlap.astype(np.float32),
        facts={"note": "é"},
        **(beams(rng, rank, p, off, off_p, width, few) if width else {}),
    )


def beams(
    rng: Any, rank: Any, p: Any, off: Any, off_p: Any, width: int, few: float = 0.0
) -> dict[str, Any]:
    """Beams over probabilities by chance, those of the forced path as recorded there.

    ``few``: how often a node has fewer than 8 candidates, or none.
    """
    depth = rank.shape[1]
    at_off = {int(at): row for at, row in zip(off, off_p, strict=True)}
    node, rows = [], []
    for r in range(len(rank)):
        said: dict[tuple[int, ...], Any] = {}

        def offered(path: tuple[int, ...], r: int = r, said: Any = said) -> list[float]:
            if path not in said:
                d = len(path)
                if set(path) <= {1}:
                    row = p[r, d]
                elif path == tuple(rank[r, :d]) and r * depth + d in at_off:
                    row = at_off[r * depth + d]
                else:
                    row = quantise(np.sort(rng.dirichlet(np.full(11, 0.3)))[::-1][:8])
                    # equals happen
                    row = np.round(row * 16) / 16 if rng.random() < 0.3 else row
                    if rng.random() < few:
                        row[rng.integers(0, 8) :] = np.nan
                said[path] = np.float32(row)
            return [float(q) for q in said[path] if not np.isnan(q)]

        layer: list[tuple[int, ...]] = [()]
        kept = set().union(*(reference_replay.beam(offered, w + 1, depth) for w in range(width)))
        for d in range(depth):
            below = sorted(path for path in kept if len(path) == d)
            for path in below:
                node.append((d, layer.index(path[:-1]) if d else 0, path[-1] if d else 0))
                offered(path)
                rows.append(said[path])
            layer = below
    return {
        "width": width,
        "beam_node": np.array(node, np.uint8).reshape(-1, 3),
        "beam_p": np.array(rows, np.float32).reshape(-1, 8),
    }
