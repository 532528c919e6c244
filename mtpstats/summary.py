"""What the counters say: every derived figure with its 95 % interval, and warnings.

Reports print a :class:`Summary` and compute nothing. ``None`` is a number the run does not have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from mtpstats.errors import InputError
from mtpstats.intervals import Interval, Z, cluster_bootstrap, greenwood, wilson
from mtpstats.stats import CENSOR_REASONS, SHOWN, Counts, Floats, Snapshot

__all__ = [
    "Category",
    "Position",
    "Summary",
    "by_category",
    "deeper_or_wider",
    "expected_length",
    "summarise",
]

Estimate: TypeAlias = Interval | None

LOOP_SHARE: Final = 0.30  # of 4-grams: above it a text loops, and loops inflate acceptance
BROKEN_RATE: Final = 0.20  # of position 1, over at least ...
BROKEN_COUNT: Final = 200  # ... this many verifications: no head that works is so bad
RANKED_COUNT: Final = 20  # rank-1 and rank-2 hits before their order means anything
ENOUGH: Final = 100  # verifications before the run may answer "deeper or wider?"


@dataclass(frozen=True)
class Position:
    """One draft position. ``index`` counts from 0."""

    index: int
    drafted: int
    reached: int
    accepted: int
    rank_counts: tuple[int, ...]
    """[8] reached, by the rank of the target's choice."""
    miss_count: int
    ranks: tuple[Estimate, ...]
    """[8] the same as shares of reached."""
    miss: Estimate
    acceptance: Estimate
    """accepted / reached."""
    unconditional: Estimate
    """accepted / verifications: tokens this position adds to a verification."""
    survival: Estimate
    """prod of accepted / reached up to here."""
    recall: tuple[Estimate, ...]
    """[8] recall@k: share of reached whose choice was among the k best."""
    p1: Estimate
    """Mean probability of the head's best, over reached."""
    p2: Estimate
    """The same of its second choice: beside ``rank2`` it says whether the head's own doubt is a
    usable signal."""
    p1_top10: Estimate
    """The same under a softmax over the 10 best, which llama.cpp compares with p_min."""
    p2_top10: Estimate
    mean_p: tuple[float | None, ...]
    """[8] mean probability by rank."""
    widening: Estimate
    """rank 2 hits / verifications: tokens a rank-2 leaf here would add to a verification."""
    stopped: int
    stopped_hit: Estimate
    """Of drafts p_min ended here whose tokens were all accepted: the next guess was right."""
    censored: dict[str, int]
    """Wholly accepted drafts that ended before this position, by reason."""
    calibration1: tuple[tuple[int, int], ...]
    """[10] deciles of p1: (reached, hits)."""
    calibration2: tuple[tuple[int, int], ...]

    @property
    def number(self) -> int:
        """The position as people are shown it, from 1."""
        return self.index + 1

    @property
    def rank1(self) -> Estimate:
        """How often the head's best was right."""
        return self.ranks[0]

    @property
    def rank2(self) -> Estimate:
        """How often its second choice was right."""
        return self.ranks[1]


@dataclass(frozen=True)
class Summary:
    """A run. Estimates are (value, lo, hi) or None."""

    verifications: int
    drafted: int
    accepted: int
    tokens: int
    """Generated tokens: as given, otherwise accepted + 1 a verification."""
    acceptance: Estimate
    """accepted / drafted, what llama.cpp prints for a run."""
    acceptance_length: Estimate
    """Mean acceptance length, 1 + accepted / verifications: the bonus token is in it."""
    coverage: Estimate
    """Drafted tokens per generated token; may exceed 1."""
    drafted_per_verification: Estimate
    expected_length: Estimate
    """1 + sum of survival over the drafted positions: a draft that always goes that deep."""
    positions: tuple[Position, ...]
    """Positions drafted (or stopped at) at least once, without gaps from 0."""
    discarded: int
    unresolved: int
    invalid: int
    dropped_drafts: int
    dropped_tokens: int
    cut_tokens: int
    padded_rows: int
    nan_rows: int
    beyond_drafted: int
    beyond_reached: int
    beyond_accepted: int
    loops: float | None
    """Largest share of repeated 4-grams among the texts, None if not told."""
    prompts: int
    """Prompts behind the intervals; 0 if they are not known apart."""
    warnings: tuple[str, ...]


def expected_length(rates: Sequence[float]) -> float:
    """Tokens a round when position i is accepted with rate i, given it is reached.

    ``1 + r0 + r0 r1 + ...``: three positions at 0.5 give 1.875.
    """
    total, survival = 1.0, 1.0
    for rate in rates:
        survival *= rate
        total += survival
    return total


class _Ratios:
    """Ratios of sums, with a bootstrap over prompts where they are known and say something."""

    def __init__(self, parts: Sequence[Snapshot], seed: int) -> None:
        self.parts, self.seed = parts, seed
        self.names: list[object] = []
        self.top: list[Floats] = []
        self.bottom: list[Floats] = []
        self.found: dict[object, Estimate] = {}

    def add(self, name: object, top: Floats, bottom: Floats) -> None:
        """A figure by its numerator and denominator in each prompt."""
        self.names.append(name)
        self.top.append(top)
        self.bottom.append(bottom)

    def solve(self) -> None:
        if self.names:
            found = cluster_bootstrap(
                np.stack(self.top, axis=1), np.stack(self.bottom, axis=1), seed=self.seed
            )
            self.found = dict(zip(self.names, found, strict=True))

    def get(self, name: object, otherwise: Estimate) -> Estimate:
        """The bootstrap's interval around the whole run's value."""
        found = self.found.get(name)
        if found is None or otherwise is None:
            return otherwise
        value = otherwise.value
        return Interval(value, min(value, found.lo), max(value, found.hi))


def summarise(
    total: Snapshot,
    by_prompt: Sequence[Snapshot] | None = None,
    tokens: int | Sequence[int] | None = None,
    loops: float | Sequence[float | None] | None = None,
    *,
    seed: int = 0,
) -> Summary:
    """Everything that follows from the counters of a run.

    Args:
        total: the run's counters.
        by_prompt: the same by prompt. With two or more the intervals come from a bootstrap over
            prompts, since tokens of one prompt are not independent; otherwise, and where all
            prompts agree, from Wilson's formula, which is too narrow for dependent tokens.
        tokens: generated tokens, of the run or of each prompt; None: accepted + 1 a verification.
        loops: share of repeated 4-grams, of the text or of each prompt's.
        seed: of the bootstrap.

    Raises:
        InputError: tokens that are negative, or not as many numbers as prompts.
    """
    parts = list(by_prompt or ())
    made = [s.tokens_accepted + s.verifications for s in parts]
    generated = total.tokens_accepted + total.verifications
    if isinstance(tokens, int):
        generated = tokens
    elif tokens is not None:
        made, generated = list(tokens), sum(tokens)
    if generated < 0 or min(made, default=0) < 0 or len(made) != len(parts):
        raise InputError(f"{len(made)} token counts, {generated} in all, for {len(parts)} prompts")
    depth = _depth(total)
    ratios = _Ratios(parts, seed)
    _add_figures(ratios, depth, made)
    ratios.solve()
    survival = greenwood(total.accepted.tolist()[:depth], total.reached.tolist()[:depth])
    positions = tuple(_position(total, i, survival[i], ratios) for i in range(depth))
    drafted, accepted = total.tokens_drafted, total.tokens_accepted
    shares = (
        [loops] if isinstance(loops, float | int) else [s for s in loops or () if s is not None]
    )
    return Summary(
        verifications=total.verifications,
        drafted=drafted,
        accepted=accepted,
        tokens=generated,
        acceptance=ratios.get("acceptance", wilson(accepted, drafted)),
        acceptance_length=_plus_one(
            ratios.get("length", _mean(total.accepted, total.beyond_accepted, total))
        ),
        coverage=ratios.get("coverage", _coverage(total, generated)),
        drafted_per_verification=ratios.get(
            "drafted", _mean(total.drafted, total.beyond_drafted, total)
        ),
        expected_length=_expected([p.survival for p in positions if p.drafted]),
        positions=positions,
        discarded=total.discarded,
        unresolved=total.unresolved,
        invalid=total.invalid,
        dropped_drafts=total.dropped_drafts,
        dropped_tokens=total.dropped_tokens,
        cut_tokens=total.cut_tokens,
        padded_rows=total.padded_rows,
        nan_rows=total.nan_rows,
        beyond_drafted=total.beyond_drafted,
        beyond_reached=total.beyond_reached,
        beyond_accepted=total.beyond_accepted,
        loops=max(shares, default=None),
        prompts=len(parts),
        warnings=_warnings(total, shares),
    )


@dataclass(frozen=True)
class Category:
    """The prompts of one category; intervals as in :class:`Summary`."""

    name: str | None
    prompts: int
    tokens: int
    acceptance: Estimate
    """accepted / reached at the first position."""
    rank2: Estimate
    """How often the second choice was right there."""
    acceptance_length: Estimate
    coverage: Estimate


def by_category(
    names: Sequence[str | None],
    by_prompt: Sequence[Snapshot],
    tokens: Sequence[int],
    *,
    seed: int = 0,
) -> list[Category]:
    """The figures of each category, the one with most prompts first, else in order of appearance.

    Args:
        names, by_prompt, tokens: of each prompt its category, counters, generated tokens.
        seed: of the bootstrap.
    """
    groups: dict[str | None, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name, []).append(index)
    found = [
        _category(name, [by_prompt[i] for i in members], [tokens[i] for i in members], seed)
        for name, members in groups.items()
    ]
    return sorted(found, key=lambda category: -category.prompts)


def _category(
    name: str | None, parts: Sequence[Snapshot], made: Sequence[int], seed: int
) -> Category:
    total, tokens = Snapshot.merge(*parts), sum(made)
    reached = np.array([s.reached[0] for s in parts], np.float64)
    accepted = np.array([s.accepted[0] for s in parts], np.float64)
    second = np.array([s.rank[0, 1] for s in parts], np.float64)
    ratios = _Ratios(parts, seed)
    _add_figures(ratios, 0, made)
    ratios.add("first", accepted, reached)
    ratios.add("second", second, reached)
    ratios.solve()
    return Category(
        name,
        len(parts),
        tokens,
        ratios.get("first", wilson(accepted.sum(), reached.sum())),
        ratios.get("second", wilson(second.sum(), reached.sum())),
        _plus_one(ratios.get("length", _mean(total.accepted, total.beyond_accepted, total))),
        ratios.get("coverage", _coverage(total, tokens)),
    )


def _depth(total: Snapshot) -> int:
    used = np.flatnonzero(total.drafted + total.stopped)
    return int(used[-1]) + 1 if used.size else 0


def _add_figures(ratios: _Ratios, depth: int, made: Sequence[int]) -> None:
    """Numerators and denominators, [prompts], of all that the bootstrap serves."""
    parts = ratios.parts
    if len(parts) < 2:
        return

    def field(name: str) -> Floats:
        return np.array([getattr(s, name) for s in parts], np.float64)

    passes = field("verifications")
    accepted, drafted = field("tokens_accepted"), field("tokens_drafted")
    ratios.add("acceptance", accepted, drafted)
    ratios.add("length", accepted, passes)
    ratios.add("drafted", drafted, passes)
    ratios.add("coverage", drafted, np.array(made, np.float64))
    if not depth:
        return
    hits, reached, rank, miss = (field(n) for n in ("accepted", "reached", "rank", "miss"))
    p, p_top10 = field("sum_p"), field("sum_p_top10")
    found = rank.cumsum(axis=2)
    stopped_hit, stopped_reached = field("stopped_hit"), field("stopped_reached")
    for i in range(depth):
        here = reached[:, i]
        ratios.add(("acceptance", i), hits[:, i], here)
        ratios.add(("unconditional", i), hits[:, i], passes)
        ratios.add(("widening", i), rank[:, i, 1], passes)
        ratios.add(("miss", i), miss[:, i], here)
        ratios.add(("stopped", i), stopped_hit[:, i], stopped_reached[:, i])
        for r in range(SHOWN):
            ratios.add(("rank", i, r), rank[:, i, r], here)
            ratios.add(("recall", i, r), found[:, i, r], here)
        for r in range(2):
            ratios.add(("p", i, r), p[:, i, r], here)
            ratios.add(("top10", i, r), p_top10[:, i, r], here)


def _position(total: Snapshot, i: int, survival: Estimate, ratios: _Ratios) -> Position:
    reached, accepted = int(total.reached[i]), int(total.accepted[i])
    ranks = total.rank[i].tolist()
    sums, sums10 = total.sum_p[i].tolist(), total.sum_p_top10[i].tolist()

    def share(name: object, k: float, n: float) -> Estimate:
        return ratios.get(name, wilson(k, n))

    return Position(
        index=i,
        drafted=int(total.drafted[i]),
        reached=reached,
        accepted=accepted,
        rank_counts=tuple(ranks),
        miss_count=int(total.miss[i]),
        ranks=tuple(share(("rank", i, r), n, reached) for r, n in enumerate(ranks)),
        miss=share(("miss", i), int(total.miss[i]), reached),
        acceptance=share(("acceptance", i), accepted, reached),
        unconditional=share(("unconditional", i), accepted, total.verifications),
        survival=survival,
        recall=tuple(share(("recall", i, k), sum(ranks[: k + 1]), reached) for k in range(SHOWN)),
        p1=share(("p", i, 0), sums[0], reached),
        p2=share(("p", i, 1), sums[1], reached),
        p1_top10=share(("top10", i, 0), sums10[0], reached),
        p2_top10=share(("top10", i, 1), sums10[1], reached),
        mean_p=tuple(s / reached if reached else None for s in sums),
        widening=share(("widening", i), ranks[1], total.verifications),
        stopped=int(total.stopped[i]),
        stopped_hit=share(("stopped", i), int(total.stopped_hit[i]), int(total.stopped_reached[i])),
        censored={name: int(total.censored[j, i]) for j, name in enumerate(CENSOR_REASONS)},
        calibration1=tuple((int(n), int(hit)) for n, hit in total.calib_p1[i]),
        calibration2=tuple((int(n), int(hit)) for n, hit in total.calib_p2[i]),
    )


def _moments(counts: Sequence[int], beyond: int, n: int) -> tuple[float, float]:
    """Mean and variance over n verifications of a length, of which ``counts[i]`` pass i.

    What lies beyond the counted positions is in the mean; the variance takes it as one position.
    """
    every = [*counts, beyond]
    mean = sum(every) / n
    square = sum((2 * i + 1) * c for i, c in enumerate(every)) / n
    return mean, max(0.0, square - mean * mean)


def _mean(counts: Counts, beyond: int, total: Snapshot) -> Estimate:
    """Mean of a length by verification, with a normal interval."""
    n = total.verifications
    if n == 0:
        return None
    mean, variance = _moments(counts.tolist(), beyond, n)
    half = Z * math.sqrt(variance / n)
    return Interval(mean, max(0.0, mean - half), mean + half)


def _plus_one(x: Estimate) -> Estimate:
    return None if x is None else Interval(x.value + 1, x.lo + 1, x.hi + 1)


def _coverage(total: Snapshot, tokens: int) -> Estimate:
    """Drafted / generated. Drafted and accepted lengths go up together, so taking them as
    independent makes the interval too wide rather than too narrow."""
    n = total.verifications
    if tokens == 0 or n == 0:
        return None
    value = total.tokens_drafted / tokens
    mean_d, var_d = _moments(total.drafted.tolist(), total.beyond_drafted, n)
    mean_a, var_a = _moments(total.accepted.tolist(), total.beyond_accepted, n)
    relative = (var_d / mean_d**2 if mean_d else 0.0) + var_a / (1 + mean_a) ** 2
    factor = math.exp(Z * math.sqrt(relative / n))
    return Interval(value, value / factor, value * factor)


def _expected(survival: Sequence[Estimate]) -> Estimate:
    """The bounds move together at worst, so their sums bound the sum."""
    known = [s for s in survival if s is not None]
    if not known:
        return None
    return Interval(
        1 + sum(s.value for s in known), 1 + sum(s.lo for s in known), 1 + sum(s.hi for s in known)
    )


def _warnings(total: Snapshot, shares: Sequence[float]) -> tuple[str, ...]:
    found = []
    looping = [s for s in shares if s > LOOP_SHARE]
    if looping:
        which = (
            "the text loops" if len(shares) == 1 else f"{len(looping)} of {len(shares)} texts loop"
        )
        found.append(
            f"{which} (up to {max(looping):.0%} of the 4-grams occurred before): loops inflate"
            " acceptance"
        )
    reached, accepted = int(total.reached[0]), int(total.accepted[0])
    first, second = int(total.rank[0, 0]), int(total.rank[0, 1])
    if total.verifications >= BROKEN_COUNT and reached and accepted / reached < BROKEN_RATE:
        found.append(
            f"the head looks broken, not weak: position 1 accepted {accepted} of {reached}"
        )
    elif first + second >= RANKED_COUNT and first <= second:
        found.append(
            "the head looks broken, not weak: at position 1 its first choice was right"
            f" {first} times, its second {second}"
        )
    if total.invalid:
        found.append(f"{total.invalid} rounds had no usable logits (NaN) and are left out")
    if total.padded_rows:
        found.append(
            f"the head put padding first in {total.padded_rows} rows: its vocabulary may not be"
            " the target's"
        )
    return tuple(found)


def deeper_or_wider(summary: Summary, speedup: float | None = None) -> str:
    """One true sentence on the question, from the run's numbers.

    It compares what one more node would earn, in tokens a verification: a rank-2 leaf at the best
    position against the deepest position drafted, which bounds what a deeper one can earn. It
    counts tokens, not the time a node costs.

    Args:
        speedup: measured tokens/s over those of plain decoding, when known.
    """
    drafted = [p for p in summary.positions if p.drafted]
    if not drafted:
        return "Nothing was drafted, so this run does not say whether deeper or wider would pay."
    if speedup is not None and speedup < 1:
        return (
            f"Leave it: with drafting this ran at {speedup:.2f} times the speed of plain decoding,"
            " so drafting does not pay here as it is, let alone deeper or wider."
        )
    last = drafted[-1]
    leaf = max(drafted, key=lambda p: p.rank_counts[1])
    wide, deep = leaf.widening, last.unconditional
    if summary.verifications < ENOUGH or wide is None or deep is None:
        return (
            f"Cannot tell deeper from wider: {summary.verifications} verifications are too few"
            f" (at least {ENOUGH})."
        )
    leaf_text = f"a rank-2 leaf at position {leaf.number} would add {_range(wide)}"
    last_text = f"position {last.number}, the deepest drafted, adds {_range(deep)}"
    if wide.lo > deep.hi:
        return (
            f"Wider rather than deeper: {leaf_text} tokens a verification, while {last_text},"
            " and deeper ones can only add less."
        )
    if deep.lo > wide.hi:
        return (
            f"Deeper rather than wider: {last_text} tokens a verification, more than the best"
            f" sibling, as {leaf_text}."
        )
    return f"Too close to tell: {leaf_text} tokens a verification and {last_text}."


def _range(x: Interval) -> str:
    return f"{x.value:.3f} ({x.lo:.3f} to {x.hi:.3f})"
