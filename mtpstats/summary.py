"""What the counters say: every derived figure with its 95 % interval, and warnings.

Reports print a :class:`Summary` and compute nothing. ``None`` is a number the run does not have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, TypeAlias

import numpy as np

from mtpstats.cautions import warnings
from mtpstats.errors import InputError
from mtpstats.intervals import Interval, Z, cluster_bootstrap, greenwood, wilson
from mtpstats.stats import CENSOR_REASONS, MAX_POSITIONS, SHOWN, Counts, Floats, Snapshot, stacked

__all__ = [
    "Known",
    "Position",
    "Summary",
    "expected_length",
    "of_result",
    "summarise",
]

Estimate: TypeAlias = Interval | None

FEW: Final = 6  # prompts: resampling fewer shows too little of how prompts differ


_APART: Final = (
    *("discarded", "unresolved", "invalid", "dropped_drafts", "dropped_tokens", "cut_tokens"),
    *("padded_rows", "nan_rows", "beyond_drafted", "beyond_reached", "beyond_accepted"),
)


@dataclass(frozen=True)
class Position:
    """One draft position. ``index`` counts from 0. What the source does not hold is None."""

    index: int
    drafted: int | None
    reached: int
    accepted: int
    rank_counts: tuple[int, ...] | None
    """[8] reached, by the rank of the target's choice."""
    miss_count: int | None
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
    stopped: int | None
    stopped_hit: Estimate
    """Of drafts p_min ended here whose tokens were all accepted: the next guess was right."""
    censored: dict[str, int] | None
    """Wholly accepted drafts that ended before this position, by reason."""
    calibration1: tuple[tuple[int, int], ...] | None
    """[10] deciles of p1: (reached, hits)."""
    calibration2: tuple[tuple[int, int], ...] | None

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
    """A run. Estimates are (value, lo, hi) or None; bounds that nothing tells are NaN."""

    verifications: int | None
    drafted: int | None
    accepted: int | None
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
    calibration1: tuple[Estimate, ...] | None
    """[10] by decile of the first choice's probability, over all positions: how often right."""
    calibration2: tuple[Estimate, ...] | None
    discarded: int | None
    unresolved: int | None
    invalid: int | None
    dropped_drafts: int | None
    dropped_tokens: int | None
    cut_tokens: int | None
    padded_rows: int | None
    nan_rows: int | None
    beyond_drafted: int | None
    beyond_reached: int | None
    beyond_accepted: int | None
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
        self.of: list[int] = []
        self.found: dict[object, Estimate] = {}

    def add(self, name: object, top: Floats, bottom: Floats) -> None:
        """A figure by its numerator and denominator in each prompt; figures share arrays."""
        self.names.append(name)
        self.top.append(top)
        known = [i for i, other in enumerate(self.bottom) if other is bottom]
        if not known:
            self.bottom.append(bottom)
        self.of.append(known[0] if known else len(self.bottom) - 1)

    def solve(self) -> None:
        if self.names:
            found = cluster_bootstrap(
                np.stack(self.top, axis=1),
                np.stack(self.bottom, axis=1),
                of=self.of,
                seed=self.seed,
            )
            self.found = dict(zip(self.names, found, strict=True))

    def get(self, name: object, otherwise: Estimate) -> Estimate:
        """The bootstrap's interval around the whole run's value."""
        found = self.found.get(name)
        if found is None or otherwise is None:
            return otherwise
        value, lo, hi = otherwise
        if len(self.parts) < FEW and not math.isnan(lo):
            return Interval(value, min(lo, found.lo), max(hi, found.hi))
        return Interval(value, min(value, found.lo), max(value, found.hi))


@dataclass(frozen=True)
class Known:
    """What a source says apart from the counters, when those are not all known.

    ``drafted`` and ``accepted`` are tokens, of each prompt or of the run; ``unknown`` are the
    names of the counters that it does not hold.
    """

    drafted: Sequence[int | None]
    accepted: Sequence[int | None]
    unknown: frozenset[str]


def summarise(
    total: Snapshot,
    by_prompt: Sequence[Snapshot] | None = None,
    tokens: int | Sequence[int] | None = None,
    loops: float | Sequence[float | None] | None = None,
    *,
    known: Known | None = None,
    positions: int | None = None,
    seed: int = 0,
) -> Summary:
    """Everything that follows from the counters of a run.

    Args:
        total: the run's counters.
        by_prompt: the same by prompt. With two or more the intervals come from a bootstrap over
            prompts, since tokens of one prompt are not independent; otherwise, and where all
            prompts agree, from Wilson's formula, which is too narrow for dependent tokens. With
            fewer than six prompts the interval holds both.
        tokens: generated tokens, of the run or of each prompt; None: accepted + 1 a verification.
        loops: share of repeated 4-grams, of the text or of each prompt's.
        known: what there is when not all counters are known; None: they are.
        positions: the first few of them only; None: all.
        seed: of the bootstrap.

    Raises:
        InputError: tokens that are negative, or not as many numbers as prompts.
    """
    parts = list(by_prompt or ())
    unknown = known.unknown if known else frozenset[str]()
    made = [s.tokens_accepted + s.verifications for s in parts]
    generated = total.tokens_accepted + total.verifications
    if isinstance(tokens, int):
        generated = tokens
    elif tokens is not None:
        made, generated = list(tokens), sum(tokens)
    if generated < 0 or min(made, default=0) < 0 or len(made) != len(parts):
        raise InputError(f"{len(made)} token counts, {generated} in all, for {len(parts)} prompts")
    lengths = _lengths(total, parts, known)
    depth = min(_depth(total), MAX_POSITIONS if positions is None else positions)
    ratios = _Ratios(parts, seed)
    _add_figures(ratios, depth, made, lengths)
    ratios.solve()
    survival = greenwood(total.accepted.tolist()[:depth], total.reached.tolist()[:depth])
    shown = tuple(_position(total, i, survival[i], ratios, unknown) for i in range(depth))
    drafted, accepted, passes = lengths.drafted, lengths.accepted, lengths.passes
    told = drafted is not None and accepted is not None
    shares = (
        [loops] if isinstance(loops, float | int) else [s for s in loops or () if s is not None]
    )
    return Summary(
        verifications=passes,
        drafted=drafted,
        accepted=accepted,
        tokens=generated,
        acceptance=ratios.get("acceptance", wilson(accepted or 0, drafted or 0) if told else None),
        acceptance_length=_plus_one(
            ratios.get("length", _mean("accepted", total, lengths, unknown))
        ),
        coverage=ratios.get("coverage", _coverage(total, generated, lengths, unknown)),
        drafted_per_verification=ratios.get("drafted", _mean("drafted", total, lengths, unknown)),
        expected_length=_expected([p.survival for p in shown if p.drafted != 0]),
        positions=shown,
        calibration1=_pooled(total.calib_p1, "calib_p1" in unknown),
        calibration2=_pooled(total.calib_p2, "calib_p2" in unknown),
        **{name: None if name in unknown else getattr(total, name) for name in _APART},
        loops=max(shares, default=None),
        prompts=len(parts),
        warnings=warnings(total, shares, unknown),
    )


def of_result(result: dict[str, Any]) -> Summary | None:
    """The summary of a result file's run; None for a run without statistics."""
    total, prompts = result["total"], result["prompts"]
    if total["positions"] is None:
        return None
    positions = [total["positions"], *(prompt["positions"] for prompt in prompts)]
    (counted, *by_prompt), unknown = Snapshot.from_partial(positions)
    known = Known([p["drafted"] for p in prompts], [p["accepted"] for p in prompts], unknown)
    return summarise(
        counted,
        by_prompt=by_prompt,
        tokens=[prompt["tokens"] for prompt in prompts],
        loops=[prompt["repeated_4grams"] for prompt in prompts],
        known=known if unknown else None,
    )


@dataclass(frozen=True)
class _Lengths:
    """Tokens drafted and accepted and the verifications: of the run, and [prompts] of each."""

    drafted: int | None
    accepted: int | None
    passes: int | None
    each_drafted: Floats | None
    each_accepted: Floats | None
    each_passes: Floats | None


def _lengths(total: Snapshot, parts: Sequence[Snapshot], known: Known | None) -> _Lengths:
    drafted: Sequence[int | None] = [s.tokens_drafted for s in parts]
    accepted: Sequence[int | None] = [s.tokens_accepted for s in parts]
    all_drafted: int | None = total.tokens_drafted
    all_accepted: int | None = total.tokens_accepted
    passes: int | None = total.verifications
    each_passes: Floats | None = np.array([s.verifications for s in parts], np.float64)
    if known and "drafted" in known.unknown:
        drafted, all_drafted = known.drafted, _sum(known.drafted)
    if known and "accepted" in known.unknown:
        accepted, all_accepted = known.accepted, _sum(known.accepted)
    if known and "verifications" in known.unknown:
        passes = each_passes = None
    return _Lengths(
        all_drafted, all_accepted, passes, _floats(drafted), _floats(accepted), each_passes
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    return None if None in counts else sum(count or 0 for count in counts)


def _floats(counts: Sequence[int | None]) -> Floats | None:
    return None if None in counts else np.array(counts, np.float64)


def _depth(total: Snapshot) -> int:
    used = np.flatnonzero(total.drafted + total.reached + total.stopped)
    return int(used[-1]) + 1 if used.size else 0


def _add_figures(ratios: _Ratios, depth: int, made: Sequence[int], lengths: _Lengths) -> None:
    """Numerators and denominators, [prompts], of all that the bootstrap serves."""
    parts = ratios.parts
    if len(parts) < 2:
        return
    accepted, drafted, passes = lengths.each_accepted, lengths.each_drafted, lengths.each_passes
    generated = np.array(made, np.float64)
    for name, top, bottom in (
        ("acceptance", accepted, drafted),
        ("length", accepted, passes),
        ("drafted", drafted, passes),
        ("coverage", drafted, generated),
    ):
        if top is not None and bottom is not None:
            ratios.add(name, top, bottom)
    if passes is None:
        return
    counters = stacked(parts)

    def field(name: str) -> Floats:
        return counters[name].astype(np.float64)

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


def _position(
    total: Snapshot, i: int, survival: Estimate, ratios: _Ratios, unknown: frozenset[str]
) -> Position:
    reached, accepted = int(total.reached[i]), int(total.accepted[i])
    ranks = total.rank[i].tolist()
    sums, sums10 = total.sum_p[i].tolist(), total.sum_p_top10[i].tolist()
    ranked = not {"rank", "miss"} & unknown
    stops = not {"stopped", "stopped_hit", "stopped_reached"} & unknown

    def share(name: object, k: float, n: float, told: bool = True) -> Estimate:
        return ratios.get(name, wilson(k, n)) if told else None

    def each(name: str, counts: Sequence[float], told: bool) -> tuple[Estimate, ...]:
        return tuple(share((name, i, r), n, reached, told) for r, n in enumerate(counts))

    p1, p2 = each("p", sums[:2], "sum_p" not in unknown)
    p1_top10, p2_top10 = each("top10", sums10[:2], "sum_p_top10" not in unknown)
    return Position(
        index=i,
        drafted=None if "drafted" in unknown else int(total.drafted[i]),
        reached=reached,
        accepted=accepted,
        rank_counts=tuple(ranks) if ranked else None,
        miss_count=int(total.miss[i]) if ranked else None,
        ranks=each("rank", ranks, ranked),
        miss=share(("miss", i), int(total.miss[i]), reached, ranked),
        acceptance=share(("acceptance", i), accepted, reached),
        unconditional=share(("unconditional", i), accepted, total.verifications),
        survival=survival,
        recall=each("recall", list(accumulate(ranks)), ranked),
        p1=p1,
        p2=p2,
        p1_top10=p1_top10,
        p2_top10=p2_top10,
        mean_p=tuple(s / reached if reached and "sum_p" not in unknown else None for s in sums),
        widening=share(("widening", i), ranks[1], total.verifications, ranked),
        stopped=int(total.stopped[i]) if stops else None,
        stopped_hit=share(
            ("stopped", i), int(total.stopped_hit[i]), int(total.stopped_reached[i]), stops
        ),
        censored=None
        if "censored" in unknown
        else {name: int(total.censored[j, i]) for j, name in enumerate(CENSOR_REASONS)},
        calibration1=None if "calib_p1" in unknown else _calibration(total.calib_p1[i]),
        calibration2=None if "calib_p2" in unknown else _calibration(total.calib_p2[i]),
    )


def _calibration(deciles: Counts) -> tuple[tuple[int, int], ...]:
    return tuple((int(n), int(hit)) for n, hit in deciles)


def _pooled(deciles: Counts, is_unknown: bool) -> tuple[Estimate, ...] | None:
    if is_unknown:
        return None
    return tuple(wilson(int(hit), int(n)) for n, hit in deciles.sum(axis=0))


def _moments(counts: Sequence[int], beyond: int, n: int) -> tuple[float, float]:
    """Mean and variance over n verifications of a length, of which ``counts[i]`` pass i.

    What lies beyond the counted positions is in the mean; the variance takes it as one position.
    """
    every = [*counts, beyond]
    mean = sum(every) / n
    square = sum((2 * i + 1) * c for i, c in enumerate(every)) / n
    return mean, max(0.0, square - mean * mean)


def _mean(name: str, total: Snapshot, lengths: _Lengths, unknown: frozenset[str]) -> Estimate:
    """Mean of a length ("drafted", "accepted") by verification, with a normal interval.

    Where only the sum is known the bounds are NaN.
    """
    n, tokens = lengths.passes, getattr(lengths, name)
    if not n or tokens is None:
        return None
    if name in unknown:
        return Interval(tokens / n, math.nan, math.nan)
    mean, variance = _moments(getattr(total, name).tolist(), getattr(total, f"beyond_{name}"), n)
    half = Z * math.sqrt(variance / n)
    return Interval(mean, max(0.0, mean - half), mean + half)


def _plus_one(x: Estimate) -> Estimate:
    return None if x is None else Interval(x.value + 1, x.lo + 1, x.hi + 1)


def _coverage(total: Snapshot, tokens: int, lengths: _Lengths, unknown: frozenset[str]) -> Estimate:
    """Drafted / generated. Drafted and accepted lengths go up together, so taking them as
    independent makes the interval too wide rather than too narrow."""
    n, drafted = lengths.passes, lengths.drafted
    if tokens == 0 or n == 0 or drafted is None:
        return None
    value = drafted / tokens
    if n is None or {"drafted", "accepted"} & unknown:
        return Interval(value, math.nan, math.nan)
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
