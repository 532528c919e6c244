"""Costs: what verifying and drafting take on one machine, by the rows of a pass.

All times are seconds of wall clock. A cost file is JSON with ``"schema": "mtpstats.cost/1"``; by
hand it needs no more than ::

    {"schema": "mtpstats.cost/1",
     "verify": {"1": 0.021, "2": 0.022, "4": 0.024, "8": 0.031},
     "draft": {"1": 0.0021}}

A point is a number, or the list of its samples, whose median counts and whose spread goes into the
interval of a prediction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mtpstats import result as results
from mtpstats.errors import InputError
from mtpstats.text import printable

__all__ = ["Costs", "Curve"]

SCHEMA: Final = "mtpstats.cost/1"
MAX_ROWS: Final = 1024
_CURVES: Final = ("verify", "follow", "draft")
_ONCE: Final = ("other_verification", "other_token")

Floats: TypeAlias = npt.NDArray[np.float64]


class Curve:
    """Seconds of a pass by its rows: measured points and straight lines between them.

    Never one line through all of them: passes take time in steps. Beyond the last point it goes on
    as between the last two, though never down; with a single point it is flat.

    Args:
        samples: seconds measured at each number of rows; 1 must be among them.

    Raises:
        InputError: no point at 1, or a time that is none.
    """

    def __init__(self, samples: Mapping[int, Sequence[float]]) -> None:
        self.samples: dict[int, Floats] = {}
        for rows in sorted(samples):
            if not 1 <= rows <= MAX_ROWS:
                raise InputError(f"{rows} rows: it must be 1 to {MAX_ROWS}")
            taken = np.array(samples[rows], np.float64)
            if taken.ndim != 1 or not taken.size or not (np.isfinite(taken) & (taken >= 0)).all():
                raise InputError(f"{rows}: not one or more times in seconds")
            self.samples[rows] = taken
        if 1 not in self.samples:
            raise InputError('"1" is missing: what a pass of one row takes')
        self.rows: npt.NDArray[np.int64] = np.array(list(self.samples), np.int64)
        """[n] measured points, ascending."""
        self.seconds: Floats = np.array([np.median(s) for s in self.samples.values()])
        """[n] medians there."""

    @property
    def last(self) -> int:
        """Rows of the last measured point; what lies beyond is extrapolated."""
        return int(self.rows[-1])

    def at(self, rows: npt.ArrayLike, points: Floats | None = None) -> Floats:
        """Return seconds [..., m] of passes of ``rows`` int[m].

        ``points`` [..., n] stands in for the medians, as :meth:`draws` gives them.
        """
        wanted, known = np.asarray(rows, np.int64), self.rows
        points = self.seconds if points is None else points
        if len(known) == 1:
            return np.repeat(points, wanted.size, axis=-1)
        right = np.clip(np.searchsorted(known, wanted), 1, len(known) - 1)
        slope = (points[..., right] - points[..., right - 1]) / (known[right] - known[right - 1])
        slope = np.where(wanted > known[-1], np.maximum(slope, 0.0), slope)
        found: Floats = points[..., right] + (wanted - known[right]) * slope
        return found

    def draws(self, n: int, rng: np.random.Generator) -> Floats:
        """Return [n, points]: medians of the samples drawn anew, with replacement."""
        drawn = [
            np.median(taken[rng.integers(0, taken.size, (n, taken.size))], axis=1)
            for taken in self.samples.values()
        ]
        return np.stack(drawn, axis=1)

    def to_dict(self) -> dict[str, float | list[float]]:
        """Return the points as JSON types."""
        return {
            str(rows): float(taken[0]) if taken.size == 1 else taken.tolist()
            for rows, taken in self.samples.items()
        }


@dataclass(frozen=True, eq=False)
class Costs:
    """Times of one machine, model and context length."""

    verify: Curve
    """A target pass, with waiting for it."""
    draft: Curve
    """One step of the head over that many rows, with reading its logits."""
    follow: Curve
    """The head's pass over the rows just verified."""
    other_verification: float = 0.0
    """The driver's own time a verification, in seconds."""
    other_token: float = 0.0
    """The driver's own time a generated token, in seconds."""
    context: int | None = None
    """Text positions before the measured passes; None: not known."""
    about: dict[str, Any] = field(default_factory=dict)
    """``environment``, ``model`` and ``settings`` of the measurement, as in a result."""

    @classmethod
    def from_dict(cls, record: Any, where: str) -> Costs:
        """Read what :meth:`to_dict` returns, or less; ``InputError`` names ``where`` and the key.

        Without ``follow`` a pass over verified rows is taken to cost what a draft step of one row
        costs; ``"follow": {"1": 0}`` says that there is none.
        """
        if not isinstance(record, dict) or "schema" not in record:
            raise InputError(f'{where}: not a cost file of mtpstats: it has no "schema"')
        if record["schema"] != SCHEMA:
            raise InputError(
                f"{where}: schema {printable(repr(record['schema']))[:60]} is unknown; "
                f"this version reads {SCHEMA}"
            )
        curves = {name: _curve(record, name, where) for name in _CURVES}
        verify, draft, follow = curves["verify"], curves["draft"], curves["follow"]
        if verify is None or draft is None:
            name = "draft" if verify else "verify"
            raise InputError(f"{where}: {name} is missing: an object of seconds by rows")
        if not verify.seconds.all():
            raise InputError(f"{where}: verify has a pass that takes no time")
        once = {name: record.get(name, 0.0) for name in _ONCE}
        for name, value in once.items():
            if not _is_time(value):
                raise InputError(f"{where}: {name} is {_shown(value)}, expected seconds")
        context = record.get("context")
        if context is not None and (type(context) is not int or context < 0):
            raise InputError(f"{where}: context is {_shown(context)}, expected a count")
        about = {key: record.get(key) for key in ("environment", "model", "settings")}
        for key, value in about.items():
            if not isinstance(value, dict | None):
                raise InputError(f"{where}: {key} is {_shown(value)}, expected an object")
        return cls(
            verify=verify,
            draft=draft,
            follow=follow or Curve({1: [float(draft.seconds[0])]}),
            context=context,
            about={key: value for key, value in about.items() if value is not None},
            **once,
        )

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read a cost file; ``InputError`` says what is wrong with it."""
        where = printable(str(path))
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{where}: cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not a cost file: {printable(str(error))[:200]}") from None
        return cls.from_dict(record, where)

    @classmethod
    def merge(cls, parts: Sequence[Costs]) -> Costs:
        """Return measurements of one machine and model taken together: all their samples.

        The driver's own times are the medians of the parts'.
        """
        curves = {}
        for name in _CURVES:
            samples: dict[int, list[float]] = {}
            for part in parts:
                for rows, taken in getattr(part, name).samples.items():
                    samples.setdefault(rows, []).extend(taken.tolist())
            curves[name] = Curve(samples)
        once = {name: float(np.median([getattr(p, name) for p in parts])) for name in _ONCE}
        first = parts[0]
        return cls(
            curves["verify"], curves["draft"], curves["follow"], once["other_verification"],
            once["other_token"], first.context, first.about,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the cost file's content."""
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name).to_dict() for name in _CURVES},
            **{name: getattr(self, name) for name in _ONCE},
            "context": self.context,
            **self.about,
        }

    def save(self, path: Path) -> None:
        """Write a cost file, whole or not at all."""
        results.write(path, self.to_dict())


def _curve(record: dict[str, Any], name: str, where: str) -> Curve | None:
    points = record.get(name)
    if points is None:
        return None
    if not isinstance(points, dict):
        raise InputError(f"{where}: {name} is {_shown(points)}, expected an object")
    samples: dict[int, list[float]] = {}
    for rows, value in points.items():
        taken = value if isinstance(value, list) else [value]
        if not (rows.isascii() and rows.isdigit()) or not taken or not all(map(_is_time, taken)):
            raise InputError(
                f"{where}: {name} has {_shown(rows)}: {_shown(value)}, expected a number of rows "
                "and seconds"
            )
        samples[int(rows[:9])] = taken
    try:
        return Curve(samples)
    except InputError as error:
        raise InputError(f"{where}: {name}: {error}") from None


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _shown(value: Any) -> str:
    return printable(repr(value))[:60]
