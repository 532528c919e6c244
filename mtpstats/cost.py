"""Costs: what target passes and head steps take on a machine, and what a run of them takes.

A cost file is JSON, ``"schema": "mtpstats.cost/1"``, times in seconds. One written by hand needs
``verify`` and ``draft`` only::

    {"schema": "mtpstats.cost/1",
     "verify": {"1": 0.030, "2": 0.031, "8": 0.034, "9": 0.060},
     "draft": {"1": 0.002}}

Between two rows that were measured a straight line is taken, beyond the last one the line through
it and the one at half as many rows: never one line through all, since passes cost steps and cliffs,
and none through the last two, which noise or a single step may decide.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mtpstats import result
from mtpstats.errors import InputError
from mtpstats.text import printable

SCHEMA: Final = "mtpstats.cost/1"
CURVES: Final = ("verify", "follow", "draft", "plain")
OTHERS: Final = (
    *("other_verification", "other_draft", "other_shape", "other_token", "other_plain"),
)
FACTS: Final = ("environment", "model", "settings", "check", "comment")

TREE: Final = ("tree_target", "tree_rest")

_ROWS: Final = re.compile("[1-9][0-9]{0,4}")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """What a number of rows takes, in seconds: median, quartiles and mean of ``samples``."""

    median: float
    low: float
    high: float
    mean: float
    samples: int = 1

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Point:
        """Return the point that samples make."""
        low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
        return cls(median, low, high, float(np.mean(seconds)), len(seconds))

    @property
    def error(self) -> float:
        """Standard error of the median, from the quartiles as if the samples were normal."""
        return 1.2533 * (self.high - self.low) / 1.349 / math.sqrt(self.samples)


def half_of(rows: Floats) -> int:
    """Return the index of the last of two or more rows that is at most half of the greatest.

    >>> half_of(numpy.array([1.0, 2.0, 8.0, 9.0]))
    1
    """
    return max(int(np.searchsorted(rows, rows[-1] / 2, "right")) - 1, 0)


class Curve:
    """Seconds by number of rows.

    Args:
        points: by rows, 1 or more each; the first must be 1.
    """

    def __init__(self, points: Mapping[int, Point]) -> None:
        self.points = dict(sorted(points.items()))
        self._rows = np.array(list(self.points), np.float64)
        self._seconds = np.array([point.median for point in self.points.values()])

    @property
    def last(self) -> int:
        """The most rows that were measured; what is beyond is a guess."""
        return int(self._rows[-1])

    def __call__(self, rows: npt.ArrayLike) -> Floats:
        """Return the seconds that these numbers of rows take; 0 rows take none."""
        asked = np.asarray(rows, np.float64)
        seconds = np.interp(asked, self._rows, self._seconds)
        if len(self._rows) > 1:
            half = half_of(self._rows)
            slope = (self._seconds[-1] - self._seconds[half]) / (self._rows[-1] - self._rows[half])
            seconds = seconds + np.maximum(asked - self._rows[-1], 0.0) * max(slope, 0.0)
        return np.where(asked > 0, seconds, 0.0)

    def resampled(self, rng: np.random.Generator) -> Curve:
        """Return a curve whose points are off by their standard errors."""
        return Curve(
            {
                rows: replace(point, median=max(rng.normal(point.median, point.error), 0.0))
                for rows, point in self.points.items()
            }
        )

    def averaged(self) -> Curve:
        """Return the curve through the means."""
        return Curve({rows: replace(p, median=p.mean) for rows, p in self.points.items()})

    def scaled(self, factor: float) -> Curve:
        """Return a curve of so many times the seconds."""

        def times(p: Point) -> Point:
            return Point(
                factor * p.median, factor * p.low, factor * p.high, factor * p.mean, p.samples
            )

        return Curve({rows: times(point) for rows, point in self.points.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, to the nanosecond."""
        return {
            str(rows): {
                name: round(value, 9) if isinstance(value, float) else value
                for name, value in asdict(point).items()
            }
            for rows, point in self.points.items()
        }


@dataclass(frozen=True)
class Costs:
    """What a run's parts take.

    A verification of L drafted tokens takes ``verify(1 + L)`` in the target, ``follow(1 + L)`` in
    the head, which reads the same tokens, and ``other_verification``; each step of the head over
    ``w`` rows takes ``draft(w)`` and ``other_draft``, and ``other_shape`` after a step of other
    than ``w`` rows, as it happens in trees; each generated token takes ``other_token``. Without
    drafting a token takes ``plain(1)``, ``other_plain`` and ``other_token``: a target that keeps no
    hidden rows and no snapshots for a head is quicker. All in seconds. ``plain`` None: ``verify``
    stands in for it. ``follow`` None: nothing, as for a head that reads the target's cells, or in
    a file that counts it in ``verify``.
    """

    verify: Curve
    draft: Curve
    follow: Curve | None = None
    plain: Curve | None = None
    other_verification: float = 0.0
    other_draft: float = 0.0
    other_token: float = 0.0
    other_plain: float = 0.0
    other_shape: float = 0.0
    n_past: int | None = None
    """Tokens in the context while it was measured."""
    tree_target: float = 1.0
    """How many times as long a tree's target passes take as all of this says; known once it is
    :meth:`calibrated`. Branches are sequences of their own."""
    tree_rest: float = 1.0
    """The same of everything else: steps of the head differ in shape from one to the next."""
    facts: dict[str, Any] = field(default_factory=dict)
    """``environment``, ``model``, ``settings``: where it was measured. ``check``: seconds of real
    runs by draft length (``tree_target``, ``tree_rest``: of a tree), and what medians and means
    make of them. ``comment``: anything."""

    def seconds(
        self,
        rows: npt.ArrayLike,
        widths: npt.ArrayLike,
        tokens: npt.ArrayLike,
    ) -> Floats:
        """Return what runs take, one for each of the leading dimension.

        Args:
            rows: [..., n] verifications by the rows of their target pass.
            widths: [..., w] steps of the head by their rows.
            tokens: [...] generated tokens.
        """
        passes, steps = np.asarray(rows, np.float64), np.asarray(widths, np.float64)
        by_rows, by_width = np.arange(passes.shape[-1]), np.arange(steps.shape[-1])
        a_pass = self.verify(by_rows) + np.where(by_rows > 0, self.other_verification, 0.0)
        if self.follow is not None:
            a_pass = a_pass + self.follow(by_rows)
        a_step = self.draft(by_width) + np.where(by_width > 0, self.other_draft, 0.0)
        total: Floats = passes @ a_pass + steps @ a_step + self.other_token * np.asarray(tokens)
        return total

    def without(self, tokens: npt.ArrayLike) -> Floats:
        """Return what generating these numbers of tokens takes without drafting."""
        each = float((self.plain or self.verify)(1)) + self.other_plain + self.other_token
        seconds: Floats = each * np.asarray(tokens, np.float64)
        return seconds

    def measured(self, rows: int, width: int = 1) -> bool:
        """Whether passes of so many rows and steps of that width lie inside what was measured."""
        return rows <= self.verify.last and width <= self.draft.last

    def resampled(self, rng: np.random.Generator) -> Costs:
        """Return costs that a second measurement might have given."""
        return self._with_curves(lambda curve: curve.resampled(rng))

    def averaged(self) -> Costs:
        """Return the costs by mean instead of median: those of a machine that others use, too."""
        return self._with_curves(Curve.averaged)

    def fitting(self) -> Costs:
        """Return these costs, or by mean if that explains the real runs of ``check`` better.

        On a machine of one's own the two are alike. Where others take the processor away, a short
        step is rarely hit but then hard, a long pass nearly always, and medians compare them badly.
        """
        off = {"by_medians": 0.0, "by_means": 0.0}
        for run, one in self.facts.get("check", {}).items():
            for name in off if run not in TREE else ():
                off[name] += abs(math.log(one[name] / one["measured"]))
        return self.averaged() if off["by_means"] < off["by_medians"] else self

    def calibrated(self) -> Costs:
        """Return the costs that fit, scaled to what the real runs of ``check`` took in all.

        Medians leave hiccups out that real runs have, and few samples are rarely right in all.
        """
        fitted, check = self.fitting(), self.facts.get("check", {})
        by = "by_medians" if fitted is self else "by_means"

        def factor(kind: str) -> float:
            kinds = {"0": "plain"} | {name: name for name in TREE}
            runs = [run for n_max, run in check.items() if kinds.get(n_max, "chain") == kind]
            return (
                sum(run["measured"] for run in runs) / sum(run[by] for run in runs) if runs else 1
            )

        drafting, alone = factor("chain"), factor("plain")
        tree: dict[str, Any] = {name: factor(name) / drafting for name in TREE if name in check}
        others = {name: getattr(fitted, name) * drafting for name in OTHERS}
        others["other_plain"] = fitted.other_plain * alone
        scaled = fitted._with_curves(lambda curve: curve.scaled(drafting))
        plain = None if fitted.plain is None else fitted.plain.scaled(alone)
        return replace(scaled, plain=plain, **tree, **others)

    def _with_curves(self, change: Callable[[Curve], Curve]) -> Costs:
        follow, plain = (one and change(one) for one in (self.follow, self.plain))
        verify, draft = change(self.verify), change(self.draft)
        return replace(self, verify=verify, draft=draft, follow=follow, plain=plain)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "schema": SCHEMA,
            "n_past": self.n_past,
            **{name: curve.to_dict() for name in CURVES if (curve := getattr(self, name))},
            **{name: round(getattr(self, name), 9) for name in OTHERS},
            **self.facts,
        }

    def save(self, path: Path) -> None:
        """Write a cost file, whole or not at all."""
        result.write(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read a cost file, also one written by hand.

        Raises ``InputError`` that names the file and the key that is not as it should be.
        """
        return cls.from_dict(result.read_json(path, "cost file"), printable(str(path)))

    @classmethod
    def from_dict(cls, record: Any, where: str = "costs") -> Costs:
        """Read the JSON form; ``where`` begins the message of an ``InputError``."""
        if not isinstance(record, dict) or "schema" not in record:
            raise InputError(f'{where}: no cost file: it has no "schema"')
        if record["schema"] != SCHEMA:
            raise InputError(
                f"{where}: schema {printable(repr(record['schema']))[:60]} is unknown; this "
                f"version reads {SCHEMA}"
            )
        known = {"schema", "n_past", *CURVES, *OTHERS, *FACTS}
        for name in record:
            if name not in known:
                raise InputError(
                    f"{where}: {printable(name)[:60]} is no key of a cost file; it may have "
                    f"{', '.join(sorted(known - {'schema'}))}"
                )
        curves = {name: _curve(record[name], where, name) for name in CURVES if name in record}
        for name in ("verify", "draft"):
            if name not in curves:
                raise InputError(f"{where}: {name} is missing: seconds by number of rows")
        others = {name: _seconds(record.get(name, 0.0), where, name) for name in OTHERS}
        n_past = record.get("n_past")
        if n_past is not None and (type(n_past) is not int or n_past < 0):
            raise InputError(f"{where}: n_past is {_shown(n_past)}, expected a number of tokens")
        facts = {name: record[name] for name in FACTS if name in record}
        for name in ("environment", "model", "settings"):
            if not isinstance(facts.get(name) or {}, dict):
                raise InputError(f"{where}: {name} is {_shown(facts[name])}, expected an object")
        _check_runs(facts.get("check", {}), where)
        return cls(
            curves["verify"],
            curves["draft"],
            curves.get("follow"),
            curves.get("plain"),
            others["other_verification"],
            others["other_draft"],
            others["other_token"],
            others["other_plain"],
            others["other_shape"],
            n_past=n_past,
            facts=facts,
        )


def _shown(value: Any) -> str:
    return printable(json.dumps(value))[:60]


def _seconds(value: Any, where: str, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}: {key} is {_shown(value)}, expected seconds")
    if not 0 <= value < 1e6:
        raise InputError(f"{where}: {key} is {_shown(value)}, expected seconds, 0 or more")
    return float(value)


def _check_runs(check: Any, where: str) -> None:
    if not isinstance(check, dict) or not all(isinstance(one, dict) for one in check.values()):
        raise InputError(f"{where}: check is {_shown(check)}, expected runs by draft length")
    for n_max, run in check.items():
        for name in ("measured", "by_medians", "by_means"):
            place = f"check[{printable(n_max)[:9]}].{name}"
            if _seconds(run.get(name), where, place) == 0:
                raise InputError(f"{where}: {place} is 0: nothing takes no time")


def _curve(value: Any, where: str, name: str) -> Curve:
    if not isinstance(value, dict) or not value:
        raise InputError(
            f'{where}: {name} is {_shown(value)}, expected seconds by rows: {{"1": 0.03, ...}}'
        )
    points: dict[int, Point] = {}
    for key, entry in value.items():
        if not _ROWS.fullmatch(key):
            raise InputError(f"{where}: {name} has {_shown(key)}, expected a number of rows")
        place = f"{name}[{key}]"
        if isinstance(entry, dict):
            points[int(key)] = _point(entry, where, place)
        else:
            seconds = _seconds(entry, where, place)
            points[int(key)] = Point(seconds, seconds, seconds, seconds)
        if name != "follow" and points[int(key)].median == 0:
            raise InputError(f"{where}: {place} is 0: nothing takes no time")
    if 1 not in points:
        raise InputError(f"{where}: {name} has no entry for 1 row")
    return Curve(points)


def _point(entry: dict[str, Any], where: str, place: str) -> Point:
    if "median" not in entry:
        raise InputError(f"{where}: {place} has no median")
    median = _seconds(entry["median"], where, f"{place}.median")
    low = _seconds(entry.get("low", median), where, f"{place}.low")
    high = _seconds(entry.get("high", median), where, f"{place}.high")
    mean = _seconds(entry.get("mean", median), where, f"{place}.mean")
    samples = entry.get("samples", 1)
    if type(samples) is not int or not 1 <= samples < 2**31:
        raise InputError(f"{where}: {place}.samples is {_shown(samples)}, expected a count")
    if not low <= median <= high:
        raise InputError(f"{where}: {place}: low, median and high are not in this order")
    return Point(median, low, high, mean, samples)


def merged(found: Sequence[Costs]) -> Costs:
    """Return several measurements of one machine as one: the medians of all they say."""

    def middle(ones: Sequence[Any], name: str) -> float:
        return float(np.median([getattr(one, name) for one in ones]))

    def curve(name: str) -> Curve | None:
        points: dict[int, list[Point]] = {}
        for one in (getattr(costs, name) for costs in found):
            for rows, point in one.points.items() if one is not None else ():
                points.setdefault(rows, []).append(point)
        return Curve({rows: joined(ones) for rows, ones in points.items()}) if points else None

    def joined(ones: Sequence[Point]) -> Point:
        of = {f.name: middle(ones, f.name) for f in fields(Point) if f.name != "samples"}
        return Point(**of, samples=sum(one.samples for one in ones))

    check: dict[str, dict[str, float]] = {}
    for costs in found:
        for n_max, run in costs.facts.get("check", {}).items():
            sums = check.setdefault(n_max, dict.fromkeys(run, 0.0))
            for name, seconds in run.items():
                sums[name] += seconds
    first = found[0]
    return replace(
        first,
        **{name: curve(name) for name in CURVES},  # type: ignore[arg-type]
        **{name: middle(found, name) for name in OTHERS},  # type: ignore[arg-type]
        facts=first.facts | ({"check": check} if check else {}),
    )
