"""What a text is generated with, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpstats.stats import Snapshot

NEAR_TIE = 1e-2
"""A target choice with a smaller margin may differ under another batch shape (DESIGN 4)."""


@dataclass(frozen=True)
class Sampling:
    """How the target chooses: ``temp`` 0 is greedy; else a draw keyed by (seed, position)."""

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0


@dataclass
class Seconds:
    """Wall-clock seconds: reading the prompt, target passes, head passes, everything else."""

    prompt: float = 0.0
    target: float = 0.0
    head: float = 0.0
    other: float = 0.0

    @property
    def generation(self) -> float:
        """All of the generation: target + head + other."""
        return self.target + self.head + self.other


@dataclass
class Trees:
    """What the trees of a text came to: sums over its verifications.

    ``levels`` are their depths, ``rows`` those of the target's passes, which may be more than the
    nodes and one for each verification.
    """

    nodes: int = 0
    levels: int = 0
    rows: int = 0

    def add(self, nodes: int, depth: int, rows: int) -> None:
        """Count one verification."""
        self.nodes += nodes
        self.levels += depth
        self.rows += rows


@dataclass
class Generation:
    """What one prompt gave.

    ``tokens`` holds every generated token, an end-of-generation token included; ``text`` leaves
    that one out. ``margins`` holds the target's margin at each token: the gap between its two best
    logits, or for a sampled target the distance of the draw from the nearest edge of the chosen
    token's interval. ``verifications`` holds (drafted, accepted) of each target pass, in order;
    their sums are ``drafted`` and ``accepted``. ``stop`` is ``"eog"``, ``"n_predict"``,
    ``"context"`` or ``"nan"`` (the target gave no finite logit). ``trees``: of drafts that branch,
    whose verifications hold nodes instead of drafted tokens.
    """

    tokens: list[int] = field(default_factory=list)
    text: bytes = b""
    verifications: list[tuple[int, int]] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    stop: str = "n_predict"
    seconds: Seconds = field(default_factory=Seconds)
    snapshot: Snapshot | None = None
    trees: Trees | None = None

    @property
    def drafted(self) -> int:
        """Tokens sent to verification."""
        return sum(drafted for drafted, _ in self.verifications)

    @property
    def accepted(self) -> int:
        """Drafted tokens the target agreed with."""
        return sum(accepted for _, accepted in self.verifications)

    @property
    def near_ties(self) -> int:
        """Tokens whose margin is below ``NEAR_TIE``."""
        return sum(margin < NEAR_TIE for margin in self.margins)
