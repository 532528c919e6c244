"""Two results of the same prompts -> differences with intervals, and a plain verdict of each.

Paired by prompt where the prompts are the same: whole prompts are drawn anew, the same ones on
both sides, so that what makes a prompt easy or hard falls out. Otherwise from the two runs' own
intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from mtpstats import result as results
from mtpstats.errors import InputError
from mtpstats.intervals import Floats, Interval, bounds, cluster_bootstrap, ratios_of_sums
from mtpstats.stats import Snapshot
from mtpstats.summary import FEW, Estimate, Summary, of_result
from mtpstats.text import printable

# What must be alike: it decides which texts are continued, for how long and how drafts end, so
# that another value gives other numbers whatever head, build or cache type is looked at.
MUST_MATCH: Final = (
    "model.vocabulary",
    *("settings.n_predict", "settings.n_max", "settings.n_min", "settings.p_min"),
    *("settings.temp", "settings.top_k", "settings.top_p", "settings.min_p"),
)
_SAMPLING: Final = ("settings.top_k", "settings.top_p", "settings.min_p")  # unused when greedy
_TEMPLATE: Final = ("settings.chat_template_sha256", "settings.chat_template_kwargs")
_MACHINE: Final = (
    *("environment.cpu", "environment.devices", "settings.n_threads", "settings.n_parallel"),
)
# What was asked for, or how many: not what ran.
_MEANT: Final = {"n_prompts", "chat_prompts", "n_max_asked", "temp_source", "shard"}
_LIBRARY: Final = ("version", "source", "backend", "flags")
_SHOWN: Final = (
    *("model.file", "model.architecture", "model.quantisation", "model.sha256"),
    *("model.draft_model.file", "model.draft_model.sha256"),
    *(f"environment.library.{key}" for key in _LIBRARY),
    *("environment.mtpstats", "environment.source.kind", "environment.cpu"),
)

FIGURES: Final = {
    "length": "mean acceptance length",
    "acceptance": "accepted of drafted",
    "speed": "tokens/s",
}

# Pairs of prompts: of fewer, all may change the same way by chance more often than 1 in 20 times.
ENOUGH: Final = FEW

BETTER: Final = "better"
WORSE: Final = "worse"
SAME: Final = "same"
CANNOT_TELL: Final = "cannot tell"


@dataclass(frozen=True)
class Difference:
    """One figure of two runs. None is what a run does not hold.

    ``change`` is b - a; ``relative`` is b / a - 1. ``verdict`` is for b: better or worse where the
    interval of the change lies on one side of 0, ``same`` where every prompt gave the same. Single
    positions have none: among many, one lies outside its interval by chance.
    """

    figure: str
    position: int | None
    a: float | None
    b: float | None
    change: Estimate
    relative: Estimate
    verdict: str | None


@dataclass(frozen=True)
class Comparison:
    """Run b against run a. ``length``, ``acceptance`` and ``speed`` are of the whole run."""

    a: str
    b: str
    prompts: int
    paired: bool
    differs: tuple[tuple[str, Any, Any], ...]
    """(field, value in a, value in b) of everything known that is not alike."""
    remarks: tuple[str, ...]
    length: Difference
    acceptance: Difference
    speed: Difference
    positions: tuple[Difference, ...]
    """The conditional acceptance of each position."""

    @property
    def overall(self) -> tuple[Difference, ...]:
        """The figures of the whole run."""
        return self.length, self.acceptance, self.speed


def compare(a: tuple[str, dict[str, Any]], b: tuple[str, dict[str, Any]]) -> Comparison:
    """Compare run ``b`` with run ``a``; both are (name for messages, result).

    Raises InputError, naming the field, when the runs cannot be compared.
    """
    (name_a, first), (name_b, second) = a, b
    names = f"{printable(name_a)} and {printable(name_b)}"
    differs = tuple(_differences(first, second))
    remarks = _refuse_unlike(first, second, names)
    pairs, said = _pair(first, second, names)
    remarks += said
    speed_fields = [field for field, _, _ in differs if field in _MACHINE]
    if speed_fields:
        differing = ", ".join(speed_fields)
        remarks.append(f"tokens/s are of unlike machines or loads: {differing} differ")
    if pairs:
        sides = [
            _Side(_with(whole, [pair[i] for pair in pairs]))
            for i, whole in enumerate((first, second))
        ]
    else:
        sides = [_Side(first), _Side(second)]
    if 0 < len(pairs) < ENOUGH:
        remarks.append(f"{len(pairs)} prompts are too few to tell: at least {ENOUGH} are needed")
    found = _Paired(*sides) if pairs else _Apart(*sides)
    depth = max(side.depth for side in sides)
    return Comparison(
        a=name_a,
        b=name_b,
        prompts=len(pairs),
        paired=bool(pairs),
        differs=differs,
        remarks=tuple(remarks),
        length=found.difference("length"),
        acceptance=found.difference("acceptance"),
        speed=found.difference("speed"),
        positions=tuple(found.difference("position", i) for i in range(depth)),
    )


# ---- may they be compared?


def _at(result: dict[str, Any], field: str) -> Any:
    value: Any = result
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if field == "environment.devices":  # free memory changes all the time
        return [d.get("description") for d in value if isinstance(d, dict)]
    return value


def _differences(first: dict[str, Any], second: dict[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    settings = sorted({*first["settings"], *second["settings"]} - _MEANT)
    fields = [*_SHOWN, "environment.devices", *(f"settings.{key}" for key in settings)]
    for field in fields:
        here, there = _at(first, field), _at(second, field)
        if here != there and not (field.endswith("sha256") and None in (here, there)):
            yield field, here, there


def _refuse_unlike(first: dict[str, Any], second: dict[str, Any], names: str) -> list[str]:
    """Return remarks on what one of them does not say."""
    greedy = _at(first, "settings.temp") == _at(second, "settings.temp") == 0
    unknown = []
    for field in MUST_MATCH:
        here, there = _at(first, field), _at(second, field)
        if here == there or (greedy and field in _SAMPLING):
            continue
        if here is None or there is None:
            unknown.append(field)
            continue
        one, other = results.told_apart(here, there)
        raise InputError(
            f"{names} cannot be compared: {field} is {one} in the first and {other} in the second"
        )
    return [f"taken to be alike, as one of the two does not say: {', '.join(unknown)}"] * bool(
        unknown
    )


def _pair(
    first: dict[str, Any], second: dict[str, Any], names: str
) -> tuple[list[tuple[dict[str, Any], dict[str, Any]]], list[str]]:
    """Return the prompts that both have, and remarks; no pairs if the texts are not known."""
    if any(p["prompt_sha256"] is None for r in (first, second) for p in r["prompts"]):
        return [], [
            "which prompts ran is not known, so they are taken to be alike, and intervals are "
            "those of runs that have nothing in common"
        ]
    by_id = {prompt["id"]: prompt for prompt in second["prompts"]}
    pairs = [(p, by_id[p["id"]]) for p in first["prompts"] if p["id"] in by_id]
    mine, others = len(first["prompts"]), len(second["prompts"])
    if not pairs or len(pairs) < min(mine, others):
        raise InputError(
            f"{names} cannot be compared: prompts differ: {mine:,} and {others:,}, of which "
            f"{len(pairs):,} have the same id"
        )
    if any(_at(first, field) != _at(second, field) for field in _TEMPLATE):
        remarks = ["the chat template differs, so the same prompt is not the same text"]
    else:
        remarks = []
        for here, there in pairs:
            if here["prompt_sha256"] != there["prompt_sha256"]:
                field, why = "prompt_sha256", "it is another text"
            elif here["n_prompt"] != there["n_prompt"]:
                field, why = "n_prompt", "the tokenizers read the same text differently"
            else:
                continue
            raise InputError(
                f"{names} cannot be compared: {field} of prompt {printable(here['id'])} differs: "
                f"{why}"
            )
    if mine != others:
        left = max(mine, others) - len(pairs)
        remarks.append(f"{left:,} prompts that only one of the two finished are left out")
    return pairs, remarks


def _with(result: dict[str, Any], prompts: list[dict[str, Any]]) -> dict[str, Any]:
    return result if prompts == result["prompts"] else results.with_prompts(result, prompts)


# ---- figures


class _Side:
    """One run by prompt: numerators and denominators, [prompts], of what is compared."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        self.sums: dict[object, tuple[Floats, Floats]] = {}
        self.depth = 0
        prompts = result["prompts"]
        drafted, accepted, passes = (
            [p[key] for p in prompts] for key in ("drafted", "accepted", "verifications")
        )
        if result["total"]["positions"] is not None:
            snapshots, unknown = Snapshot.from_partial([p["positions"] for p in prompts])
            if "drafted" not in unknown:
                drafted = [s.tokens_drafted for s in snapshots]
            if "accepted" not in unknown:
                accepted = [s.tokens_accepted for s in snapshots]
            hits = np.stack([s.accepted for s in snapshots])
            reached = np.stack([s.reached for s in snapshots])
            self.depth = int(np.flatnonzero(reached.any(axis=0))[-1:].sum()) + bool(reached.any())
            for i in range(self.depth):
                self._add(("position", i), hits[:, i].tolist(), reached[:, i].tolist())
        self._add("acceptance", accepted, drafted)
        self._add("length", accepted, passes)
        seconds = [results.generation_seconds(p["seconds"]) for p in prompts]
        self._add("speed", [p["tokens"] for p in prompts], seconds)

    @cached_property
    def summary(self) -> Summary | None:
        """The run's figures, with their intervals."""
        return of_result(self.result)

    def _add(self, name: object, top: Sequence[Any], bottom: Sequence[Any]) -> None:
        if None not in top and None not in bottom:
            self.sums[name] = np.array(top, np.float64), np.array(bottom, np.float64)

    def value(self, name: object) -> float | None:
        """The figure of the whole run, as a ratio of sums; the length with its bonus token."""
        if name not in self.sums:
            return None
        top, bottom = self.sums[name]
        if not bottom.sum() > 0:
            return None
        return float(top.sum() / bottom.sum()) + _bonus(name)

    def estimate(self, name: object) -> Estimate:
        """The figure with the run's own interval."""
        value = self.value(name)
        if value is None:
            return None
        found: Estimate = None
        if name == "speed":
            top, bottom = self.sums[name]
            found = cluster_bootstrap(top[:, None], bottom[:, None])[0]
        elif self.summary is not None and name == "acceptance":
            found = self.summary.acceptance
        elif self.summary is not None and name == "length":
            found = self.summary.acceptance_length
        elif self.summary is not None and isinstance(name, tuple):
            found = self.summary.positions[name[1]].acceptance
        return found if found is not None and not math.isnan(found.lo) else None


def _bonus(name: object) -> int:
    return 1 if name == "length" else 0


class _Apart:
    """Differences of two runs that share nothing: from the interval of each."""

    def __init__(self, a: _Side, b: _Side) -> None:
        self.a, self.b = a, b

    def difference(self, figure: str, position: int | None = None) -> Difference:
        """One figure of both, and what it says."""
        name = figure if position is None else (figure, position)
        a, b = self.a.value(name), self.b.value(name)
        change, relative = self.intervals(name)
        verdict = self.verdict(change) if position is None else None
        return Difference(figure, position, a, b, change, relative, verdict)

    def verdict(self, change: Estimate) -> str:
        """What the interval of a change says."""
        if change is None:
            return CANNOT_TELL
        if change.lo > 0:
            return BETTER
        return WORSE if change.hi < 0 else CANNOT_TELL

    def intervals(self, name: object) -> tuple[Estimate, Estimate]:
        """The change and the relative change (Zou and Donner's MOVER, 2008)."""
        a, b = self.a.estimate(name), self.b.estimate(name)
        if a is None or b is None:
            return None, None
        change = Interval(
            b.value - a.value,
            b.value - a.value - math.hypot(b.value - b.lo, a.hi - a.value),
            b.value - a.value + math.hypot(b.hi - b.value, a.value - a.lo),
        )
        if min(a.lo, b.lo) <= 0:
            return change, None
        log = math.log(b.value / a.value)
        low = math.hypot(math.log(b.value / b.lo), math.log(a.hi / a.value))
        high = math.hypot(math.log(b.hi / b.value), math.log(a.value / a.lo))
        return change, Interval(math.expm1(log), math.expm1(log - low), math.expm1(log + high))


class _Paired(_Apart):
    """Differences of two runs of the same prompts: whole pairs are drawn anew."""

    def __init__(self, a: _Side, b: _Side) -> None:
        super().__init__(a, b)
        self.names = [name for name in a.sums if name in b.sums]
        drawn = [self._drawn(side) for side in (a, b)]
        self.change, _ = bounds(drawn[1] - drawn[0])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = drawn[1] / drawn[0] - 1
        ratio[~np.isfinite(ratio)] = np.nan
        self.relative, _ = bounds(ratio)

    def _drawn(self, side: _Side) -> Floats:
        top = np.stack([side.sums[name][0] for name in self.names], axis=1)
        bottom = np.stack([side.sums[name][1] for name in self.names], axis=1)
        bonus = np.array([_bonus(name) for name in self.names], np.float64)
        return ratios_of_sums(top, bottom, list(range(len(self.names)))) + bonus

    def intervals(self, name: object) -> tuple[Estimate, Estimate]:
        """The change and the relative change, by the bootstrap."""
        a, b = self.a.value(name), self.b.value(name)
        if a is None or b is None or not self._speaks(name):
            return None, None
        j = self.names.index(name)
        relative = _around(b / a - 1, self.relative[j]) if a > 0 else None
        return _around(b - a, self.change[j]), relative

    def _speaks(self, name: object) -> bool:
        """Whether the figure exists for two prompts or more on both sides."""
        return all(np.count_nonzero(side.sums[name][1] > 0) > 1 for side in (self.a, self.b))

    def verdict(self, change: Estimate) -> str:
        """As for runs apart; and ``same`` where no pair of prompts differs."""
        if change is not None and change.lo == change.hi == 0:
            return SAME
        enough = len(self.a.result["prompts"]) >= ENOUGH
        return super().verdict(change) if enough else CANNOT_TELL


def _around(value: float, found: Floats) -> Estimate:
    lo, hi = found.tolist()
    return None if math.isnan(lo) else Interval(value, min(value, lo), max(value, hi))


def failure(comparison: Comparison, figure: str, limit: float) -> str | None:
    """Return why the check "no worse than ``limit``" (a share) does not hold; None if it does.

    It does not hold where b is worse beyond chance *and* by more than the limit. ``figure`` is
    ``length``, ``acceptance`` or ``speed``. Raises InputError when the runs do not tell.
    """
    found: Difference = getattr(comparison, figure)
    if found.relative is None or (
        comparison.paired and comparison.prompts < ENOUGH and found.verdict != SAME
    ):
        raise InputError(
            f"{printable(comparison.b)} cannot be checked against {printable(comparison.a)}: "
            f"the runs do not tell how sure a change of {FIGURES[figure]} is (at least {ENOUGH} "
            "prompts are needed, and statistics)"
        )
    if found.verdict != WORSE or found.relative.value >= -limit:
        return None
    return (
        f"{FIGURES[figure]} of {printable(comparison.b)} is {-found.relative.value:.1%} worse than "
        f"of {printable(comparison.a)}: {found.b:.4g} against {found.a:.4g}, and at most "
        f"{limit:.1%} is allowed"
    )
