"""Prices: what a policy's replay would take on a machine, and how fast that is.

A policy's replay over the trace says what it verifies and drafts, the costs say what that takes::

    tokens/s = sum(accepted + 1)
             / sum(T_verify(rows) + T_follow(followed) + sum(T_draft(width)) + other)

A chain's pass has 1 + nodes rows and the head follows all of them. A tree's pass has as many rows
as the driver sends on that memory (:func:`sent_rows`), and the head follows the accepted path.

Intervals come from resampling whole prompts and, with every resample, the samples of the costs.
All policies of a :class:`Pricer` share the resamples, so that ratios of two of them are paired.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mtpstats.cost import Costs, Curve, half_of
from mtpstats.errors import InputError
from mtpstats.policy import AdaptiveDepth, Chain, Eagle2, GatedSiblings, OptTree, Tree
from mtpstats.replay import AnyPolicy, Totals

__all__ = [
    "NO_DRAFTING",
    "Figure",
    "Priced",
    "Pricer",
    "fastest",
    "flags_of",
    "kind_of",
    "label",
    "restless",
]

NO_DRAFTING: Final = Tree()
RESAMPLES: Final = 1000
BATCH: Final = 64
BUSY: Final = 0.2  # between quartiles, as a part of the median
BUSY_ROWS: Final = 9
WIDE: Final = 65  # rows of the largest tree's pass
PARTS: Final = ("verify", "follow", "draft", "other")

Floats: TypeAlias = npt.NDArray[np.float64]


class Figure(NamedTuple):
    """A figure and its 95 % interval; None where a single prompt tells none."""

    value: float
    lo: float | None
    hi: float | None

    @property
    def above_1(self) -> bool:
        """Whether all of it lies above 1; without an interval the figure decides."""
        return (self.value if self.lo is None else self.lo) > 1

    @property
    def below_1(self) -> bool:
        """Whether all of it lies below 1."""
        return (self.value if self.hi is None else self.hi) < 1


@dataclass(frozen=True, eq=False)
class Priced:
    """One policy and what it would give. Arrays are [1 + resamples], the whole trace first."""

    policy: AnyPolicy
    kind: str
    """``none``, ``chain``, ``tree``, ``gated``, ``adaptive``, ``opttree``, ``eagle2``, ``own``."""
    verifications: Floats
    tokens: Floats
    parts: dict[str, Floats]
    """Seconds by part: ``verify``, ``follow``, ``draft``, ``other``."""
    bare: Floats
    """Of ``verify``: seconds if a pass of any rows took as long as one of a single row."""
    nodes: float
    """Nodes sent to the target, a verification."""
    rows: float
    """Rows of its pass."""
    steps: float
    """Steps of the head, a verification."""
    extrapolated: bool
    """Whether some pass is wider than any that was measured."""
    on_one_prompt: bool
    speedup: Figure | None = None
    """Speed over that of no drafting, once that is known."""
    in_sample: Figure | None = None
    """Of a tree: tokens/s on the very prompts it was chosen on; ``rate`` is on the others."""

    @cached_property
    def seconds(self) -> Floats:
        """All parts together."""
        total: Floats = np.sum(list(self.parts.values()), axis=0)
        return total

    @cached_property
    def speeds(self) -> Floats:
        """Tokens/s; NaN in a resample of texts that have none."""
        out = np.full_like(self.tokens, np.nan)
        return np.divide(self.tokens, self.seconds, out=out, where=self.seconds > 0)

    @cached_property
    def rate(self) -> Figure:
        """Predicted tokens/s."""
        return self._figure(self.speeds)

    @property
    def length(self) -> float:
        """Tokens per verification."""
        return float(self.tokens[0] / self.verifications[0])

    @property
    def period(self) -> float:
        """Seconds per verification."""
        return float(self.seconds[0] / self.verifications[0])

    @property
    def spec(self) -> str:
        """The policy in the form that ``replay --policy`` reads."""
        return "none" if self.kind == "none" else str(self.policy)

    def over(self, other: Priced) -> Figure:
        """Return how many times as fast as another policy, resample by resample."""
        return self._figure(self.speeds / other.speeds)

    def _figure(self, values: Floats) -> Figure:
        value = float(values[0])
        if self.on_one_prompt:
            return Figure(value, None, None)
        lo, hi = np.nanquantile(values[1:], (0.025, 0.975))
        return Figure(value, float(lo), float(hi))


class Pricer:
    """Prices policies of one trace: the same resamples of prompts and costs for all of them.

    Args:
        costs: of the machine in question.
        n_prompts: P, of every ``Totals`` that is priced.
        seed: of the resamples.
        memory: how a tree's branches share the target's: ``coupled`` or ``chains``
            (``llama.arch``).
    """

    def __init__(
        self,
        costs: Costs,
        n_prompts: int,
        *,
        seed: int = 0,
        resamples: int = RESAMPLES,
        memory: str = "coupled",
    ) -> None:
        if n_prompts < 1:
            raise InputError("the trace holds no prompt: there is nothing to plan from")
        rng = np.random.default_rng(seed)
        share = np.full(n_prompts, 1 / n_prompts)
        drawn = rng.multinomial(n_prompts, share, resamples)
        self._weights = np.concatenate([np.ones((1, n_prompts)), drawn])
        self._memory = memory
        self._costs = costs = costs.calibrated()
        self._curves: dict[str, _Curves | None] = {
            "verify": _Curves(costs.verify, resamples, rng),
            "draft": _Curves(costs.draft, resamples, rng),
            "follow": None if costs.follow is None else _Curves(costs.follow, resamples, rng),
            "plain": None if costs.plain is None else _Curves(costs.plain, resamples, rng),
        }

    def _seconds(self, name: str, n: int) -> Floats:
        """[1 + resamples, n] of passes of 1..n rows."""
        curves = self._curves[name]
        return np.zeros((len(self._weights), n)) if curves is None else curves.seconds(n)

    def price(self, did: Iterable[tuple[AnyPolicy, Totals]]) -> list[Priced]:
        """Return what policies give, each with what it did."""
        found: list[Priced] = []
        waiting = iter(did)
        while batch := list(islice(waiting, BATCH)):
            # One large product instead of hundreds of small ones.
            parts = [
                (done.rows[:, 1:], done.widths[:, 1:], done.tokens[:, None],
                 done.verifications[:, None], done.lengths)
                for _, done in batch
            ]  # fmt: skip
            columns = np.concatenate([one for part in parts for one in part], axis=1)
            sums = self._weights @ columns.astype(np.float64)
            ends = np.cumsum([one.shape[1] for part in parts for one in part])
            drawn = iter(np.split(sums, ends[:-1], axis=1))
            for policy, done in batch:
                rows, widths, tokens, passes, lengths = islice(drawn, 5)
                followed = lengths if isinstance(policy, Tree | GatedSiblings) else rows
                found.append(
                    self._priced(policy, done, rows, followed, widths, tokens[:, 0], passes[:, 0])
                )
        return found

    def _priced(
        self,
        policy: AnyPolicy,
        done: Totals,
        rows: Floats,
        followed: Floats,
        widths: Floats,
        tokens: Floats,
        passes: Floats,
    ) -> Priced:
        costs = self._costs
        drafting = kind_of(policy) != "none"
        alone = "plain" if not drafting and costs.plain is not None else "verify"
        sent = sent_rows(policy, rows.shape[1], self._memory)
        widest = int(sent[_widest(done.rows) - 1]) if passes[0] else 1
        verify = self._seconds(alone, int(sent.max(initial=1)))[:, sent - 1]
        follow = self._seconds("follow", followed.shape[1]) * drafting
        draft = self._seconds("draft", widths.shape[1]) + costs.other_draft
        each = costs.other_verification if drafting else costs.other_plain
        rest, slower, changes = 1.0, 1.0, 0
        if isinstance(policy, Tree | GatedSiblings) and policy.leaves > 1:
            rest, slower, changes = costs.tree_rest, costs.tree_target, policy.changes
        in_draft = np.einsum("bn,bn->b", widths, draft) + passes * changes * costs.other_shape
        in_target = slower * np.einsum("bn,bn->b", rows, verify)
        in_bare = slower * self._seconds("verify", 1)[:, 0]
        n = max(1.0, float(passes[0]))
        return Priced(
            policy=policy,
            kind=kind_of(policy),
            verifications=passes,
            tokens=tokens,
            parts={
                "verify": in_target,
                "follow": rest * np.einsum("bn,bn->b", followed, follow),
                "draft": rest * in_draft,
                "other": rest * (passes * each + tokens * costs.other_token),
            },
            # More rows never take less time; where they seem to, that is noise.
            bare=np.minimum(passes * in_bare, in_target),
            nodes=float(done.drafted.sum()) / n,
            rows=float(rows[0] @ sent) / n,
            steps=float(widths[0].sum()) / n,
            extrapolated=not costs.measured(widest, _widest(done.widths)),
            on_one_prompt=len(done.tokens) < 2,
        )


def sent_rows(policy: AnyPolicy, n: int, memory: str) -> npt.NDArray[np.int64]:
    """Return [n] the rows that passes of 0..n-1 nodes really have.

    Where each leaf is a chain of its own, those of all leaves at the depth that a tree of so many
    nodes has; of a gate, whose depth nodes do not tell, at its own.
    """
    nodes = np.arange(n)
    if memory != "chains" or not isinstance(policy, Tree | GatedSiblings) or n == 1:
        return nodes + 1
    if isinstance(policy, GatedSiblings):
        return np.full(n, policy.leaves * (1 + policy.n_max))
    within = np.cumsum(np.bincount([len(path) for path in policy.paths]))
    return policy.leaves * (1 + np.searchsorted(within, nodes))


class _Curves:
    """A measured curve and, for each resample, what another measurement might have given."""

    def __init__(self, curve: Curve, resamples: int, rng: np.random.Generator) -> None:
        self._rows = np.array(list(curve.points), np.float64)
        medians = np.array([point.median for point in curve.points.values()])
        errors = np.array([point.error for point in curve.points.values()])
        drawn = np.maximum(rng.normal(medians, errors, (resamples, len(medians))), 0.0)
        self._points = np.concatenate([medians[None], drawn])
        self._found = np.empty((resamples + 1, 0))

    def seconds(self, n: int) -> Floats:
        """[1 + resamples, n] of passes of 1..n rows, as ``Curve`` finds them."""
        if self._found.shape[1] < n:
            self._found = self._between(np.arange(1.0, max(n, WIDE) + 1))
        return self._found[:, :n]

    def _between(self, wanted: Floats) -> Floats:
        known, points = self._rows, self._points
        if len(known) == 1:
            return np.repeat(points, len(wanted), axis=1)
        right = np.clip(np.searchsorted(known, wanted), 1, len(known) - 1)
        left = np.where(wanted > known[-1], half_of(known), right - 1)
        slope = (points[:, right] - points[:, left]) / (known[right] - known[left])
        slope = np.where(wanted > known[-1], np.maximum(slope, 0.0), slope)
        found: Floats = points[:, right] + (wanted - known[right]) * slope
        return found


def restless(costs: Costs) -> str | None:
    """Return a warning if the machine was busy with something else while it was measured."""
    spreads = [
        (point.high - point.low) / point.median
        for rows, point in costs.verify.points.items()
        if rows <= BUSY_ROWS and point.samples > 1
    ]
    spread = float(np.median(spreads)) if spreads else 0.0
    if spread <= BUSY:
        return None
    return (
        f"the machine was not at rest when costs were measured: half of the samples of a pass "
        f"differ by more than {100 * spread:.0f} %, so figures of time are rough"
    )


def _widest(counts: npt.NDArray[np.int64]) -> int:
    return int(np.flatnonzero(counts.any(axis=0)).max(initial=0))


def kind_of(policy: AnyPolicy) -> str:
    """Return a policy's kind in one word."""
    if isinstance(policy, Tree):
        return "tree" if len(policy) else "none"
    if isinstance(policy, Chain | GatedSiblings | AdaptiveDepth | OptTree | Eagle2):
        return policy.kind
    return "own"


def label(policy: AnyPolicy) -> str:
    """Return a policy's name in a few words."""
    kind = kind_of(policy)
    if kind == "none":
        return "no drafting"
    if isinstance(policy, Tree):
        return f"tree of {len(policy)} node{'' if len(policy) == 1 else 's'}"
    if isinstance(policy, OptTree | Eagle2):
        deep = f", {policy.depth} deep" if isinstance(policy, Eagle2) else ""
        return f"{kind} {policy.n_nodes}, {policy.width} wide{deep}"
    if isinstance(policy, AdaptiveDepth):
        return f"adaptive {policy.low}-{policy.n_max}, p_min {policy.p_min:g}"
    if isinstance(policy, Chain | GatedSiblings):
        name = f"n_max {policy.n_max}, p_min {policy.p_min:g}"
        return name if kind == "chain" else f"{kind}, {name}"
    return str(policy)


def fastest(policies: Iterable[Priced]) -> Priced | None:
    """Return the one with the most tokens/s, the first of equals; None of none."""
    return max(policies, key=lambda p: float(p.speeds[0]), default=None)


def flags_of(policy: AnyPolicy) -> list[str]:
    """Return a chain, or no drafting, as flags of llama.cpp."""
    if not isinstance(policy, Chain):
        if kind_of(policy) != "none":
            raise InputError(f"{policy}: llama.cpp runs chains only")
        return ["--spec-type", "none"]
    flags = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(policy.n_max)]
    if policy.n_min:
        flags += ["--spec-draft-n-min", str(policy.n_min)]
    return [*flags, "--spec-draft-p-min", f"{policy.p_min:g}"]
