"""A toy target and head without libllama, live and as a trace.

The text is fixed from the start. The head's logits are drawn from (root, tokens it was fed) and
lean towards the text as long as it was fed nothing else. ``live`` runs the product's own driver
and collector on it, ``traced`` probes it for every root in plain Python.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mtpstats import speculate
from mtpstats._core import Row
from mtpstats.speculate import DraftSettings, Generation, Speculator
from mtpstats.stats import Collector
from mtpstats.trace import UNKNOWN, Trace, TracedPrompt, quantise, trace_header

VOCAB = 12


@dataclass
class Toy:
    seed: int
    n_text: int = 80
    n_prompt: int = 4
    eog_at: int | None = None
    lean: float = 2.5
    heads: str = "single"
    n_blocks: int = 1
    dead: tuple[int, ...] = ()  # roots at which the head has no finite logit
    rows: dict[tuple[int, tuple[int, ...]], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.text = [int(token) for token in rng.integers(0, VOCAB - 1, self.n_text)]
        if self.eog_at is not None:
            self.text[self.eog_at] = VOCAB - 1
        self.margins = rng.uniform(0.1, 3, self.n_text).astype(np.float32)

    def head(self, root: int, fed: tuple[int, ...]) -> np.ndarray:
        """float32[VOCAB] after ``fed`` was fed on top of the text up to the root."""
        key = (root, fed)
        if key not in self.rows:
            rng = np.random.default_rng([self.seed, root, *fed])
            row = rng.normal(size=VOCAB).astype(np.float32)
            right = root + 1 + len(fed)
            if right < self.n_text and list(fed) == self.text[root + 1 : right]:
                row[self.text[right]] += self.lean
            if root in self.dead and len(fed) == root % 3:
                row[:] = np.nan
            self.rows[key] = row
        return self.rows[key]

    def target(self, position: int) -> np.ndarray:
        """float32[VOCAB] that choose the token after a position."""
        row = np.full(VOCAB, -5, np.float32)
        chosen = self.text[position + 1] if position + 1 < self.n_text else 0
        row[chosen] = self.margins[min(position + 1, self.n_text - 1)] - 5
        return row


class Context:
    """What ``Speculator`` and its heads ask of a ``llama.Context``."""

    rollback = "any"
    n_embd_out = 1

    def __init__(self, model: Any, *, n_ctx: int, mtp: bool = False, **_: Any) -> None:
        self.model, self.toy, self.n_ctx, self.n_batch = model, model.toy, n_ctx, 64
        self.n_vocab, self.mtp = VOCAB, mtp
        self.shares_memory = self.toy.heads == "shared"
        self.states: list[tuple[int, tuple[int, ...]]] = []
        self.kept: list[Any] = []

    def decode(self, batch: Any) -> None:
        n = batch.n_tokens
        embd = (ctypes.c_float * n).from_address(batch.embd_address(0)) if self.mtp else [0.0] * n
        self.nextn = (ctypes.c_float * n)()
        self.here = []
        for i in range(n):
            token, position, code = batch._token[i], batch._pos[i], embd[i]
            state = (position, ())
            if code < 0:  # the head goes on from a row of its own
                root, fed = self.states[-int(code) - 1]
                state = (root, (*fed, token))
            self.here.append(state)
            if self.mtp:
                self.states.append(state)
                self.nextn[i] = -len(self.states)

    def logits_address(self, i: int) -> int:
        root, fed = self.here[i]
        row = self.toy.head(root, fed) if self.mtp else self.toy.target(root)
        self.kept = [*self.kept[-40:], row]
        return int(row.ctypes.data)

    def nextn_rows_address(self) -> int:
        return ctypes.addressof(self.nextn)

    def nextn_address(self, i: int) -> int:
        return ctypes.addressof(self.nextn) + 4 * i

    def groups(self, rows: dict[int, int]) -> list[list[int]]:
        return [list(rows)]

    def ignore(self, *_: Any, **__: Any) -> None:
        pass

    seq_rm = seq_cp = set_nextn = set_nextn_layer_offset = close = ignore


def live(
    toy: Toy, settings: DraftSettings, n_predict: int, n_ctx: int = 1000
) -> tuple[Generation, Speculator]:
    """Run the product's driver, with its collector, on the toy."""
    model = SimpleNamespace(
        toy=toy, n_vocab=VOCAB, n_embd_out=1, n_ctx_train=1000, n_layer_nextn=toy.n_blocks,
        kind=SimpleNamespace(rows_of_all=False, heads="single"),
        lib=SimpleNamespace(max_sequences=256),
        is_eog=lambda token: token == VOCAB - 1, piece=lambda token: b"x",
    )  # fmt: skip
    before = speculate.Context
    speculate.Context = Context  # type: ignore[assignment,misc]
    try:
        driver = Speculator(
            model,  # type: ignore[arg-type]
            draft=settings, n_ctx=n_ctx, collector=Collector(settings.n_max),
        )  # fmt: skip
        return driver.generate(toy.text[: toy.n_prompt], n_predict), driver
    finally:
        speculate.Context = before  # type: ignore[misc]


def probabilities(row: np.ndarray) -> tuple[list[int], list[float], float]:
    """Tokens and full-vocabulary probabilities of the 8 best, and the mass of the 10 best.

    By the kernel, whose sums are in single precision: a recorder and a live run get the same bits.
    """
    kernel = Row()
    kernel.read(row)
    tokens = [kernel.id(r) for r in range(1, 9) if kernel.id(r) >= 0]
    mass = math.exp(kernel.lse_top10 - kernel.lse) if tokens else 0.0
    return tokens, [kernel.prob(r + 1) for r in range(len(tokens))], mass


def traced(toy: Toy, depth: int, every: int = 1, name: str = "toy") -> TracedPrompt:
    """Probe every root."""
    text, n = toy.text, toy.n_text
    if toy.eog_at is not None:
        n = toy.eog_at + 1
    roots = list(range(toy.n_prompt - 1, n - 1, every))
    rank = np.full((len(roots), depth), UNKNOWN, np.uint8)
    p = np.full((len(roots), depth, 8), np.nan)
    top10 = np.full((len(roots), depth), np.nan)
    p_min_p = top10.copy()
    off: list[tuple[int, list[float], float]] = []
    for r, root in enumerate(roots):
        greedy: tuple[int, ...] = ()
        alive = not (toy.heads == "shared" and root == 0)
        for d in range(depth if alive else 0):
            tokens, shares, mass = probabilities(toy.head(root, greedy))
            if not tokens:
                break
            p[r, d, : len(shares)] = shares
            top10[r, d], p_min_p[r, d] = mass, shares[0] / mass
            greedy += (tokens[0],)
        for d in range(min(depth, n - 1 - root) if alive else 0):
            fed = tuple(text[root + 1 : root + 1 + d])
            tokens, shares, mass = probabilities(toy.head(root, fed))
            if not tokens:
                break
            if fed != greedy[:d]:
                off.append((r * depth + d, shares + [np.nan] * (8 - len(shares)), mass))
            right = text[root + 1 + d]
            rank[r, d] = tokens.index(right) + 1 if right in tokens else 0
            if rank[r, d] == 0:
                break
    return TracedPrompt(
        id=name,
        category=None,
        n_prompt=toy.n_prompt,
        stop="eog" if toy.eog_at is not None else "n_predict",
        n_ctx=1000,
        seconds=0.0,
        tokens=np.array(text[:n], np.int32),
        margin=toy.margins[toy.n_prompt : n],
        roots=np.array(roots, np.int32),
        rank=rank,
        p=quantise(p),
        top10=top10,
        p_min_p=p_min_p,
        off_index=np.array([at for at, _, _ in off], np.int32),
        off_p=quantise(np.array([shares for _, shares, _ in off], float).reshape(-1, 8)),
        off_top10=np.array([mass for _, _, mass in off], np.float32),
        overlap=np.where(rank == UNKNOWN, np.nan, 0.5).astype(np.float32),
    )


def trace_of(*toys: Toy, depth: int, n_predict: int, every: int = 1) -> Trace:
    header = trace_header(
        depth=depth, every=every, n_predict=n_predict, heads=toys[0].heads,
        n_blocks=toys[0].n_blocks,
    )  # fmt: skip
    return Trace(header, [traced(toy, depth, every, f"toy-{i}") for i, toy in enumerate(toys)])
