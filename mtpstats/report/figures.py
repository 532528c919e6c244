"""Charts as plain data: a caller hands series of numbers, ``svg`` and ``plot`` draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtpstats.summary import Estimate, Position, Summary


class Point(NamedTuple):
    """A value at ``x`` with its interval, if it has one."""

    x: float
    y: float
    lo: float | None = None
    hi: float | None = None


@dataclass(frozen=True)
class Series:
    """Points with a name: joined by a line, as dots, or as segments of stacked bars."""

    name: str
    points: Sequence[Point]
    form: str = "line"
    """``line``, ``dots`` or ``bars``."""


@dataclass(frozen=True)
class Chart:
    """A figure. ``percent``: values are shares of 1; ``diagonal``: the line where y equals x."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    percent: bool = False
    x_percent: bool = False
    diagonal: bool = False
    note: str = ""


# ---- the figures of a result


def charts(summary: Summary) -> list[Chart]:
    """Return the figures of a result, those that its counters are known for."""
    found = [_acceptance(summary), _ranks(summary), _calibration(summary), _gains(summary)]
    return [chart for chart in found if any(series.points for series in chart.series)]


def _acceptance(summary: Summary) -> Chart:
    return Chart(
        "acceptance",
        "Accepted by draft position",
        "draft position",
        "accepted",
        [
            _by_position("of those reached", summary, [p.acceptance for p in summary.positions]),
            _by_position(
                "of all verifications", summary, [p.unconditional for p in summary.positions]
            ),
        ],
        percent=True,
        note="Bars are 95 % intervals. Of those reached need not fall: who gets far is in easy "
        "text.",
    )


def _ranks(summary: Summary) -> Chart:
    ranked = [p for p in summary.positions if p.rank_counts is not None]
    names = [f"rank {r}" for r in range(1, len(ranked[0].ranks) + 1)] if ranked else []
    series = [
        Series(name, _points(ranked, [p.ranks[r] for p in ranked], False), "bars")
        for r, name in enumerate(names)
    ]
    if ranked:
        series.append(Series("miss", _points(ranked, [p.miss for p in ranked], False), "bars"))
    return Chart(
        "ranks",
        "Where the target's choice stood among the head's candidates",
        "draft position",
        "of those reached",
        series,
        percent=True,
        note="A chain earns rank 1; one leaf beside it earns rank 2; miss: not among the 8 best.",
    )


def _calibration(summary: Summary) -> Chart:
    series = [
        Series(
            name,
            [
                Point((decile + 0.5) / len(estimates), *estimate)
                for decile, estimate in enumerate(estimates)
                if estimate is not None
            ],
        )
        for name, estimates in (
            ("first choice (p1)", summary.calibration1),
            ("second choice (p2)", summary.calibration2),
        )
        if estimates is not None
    ]
    return Chart(
        "calibration",
        "Is the head as right as it thinks?",
        "the head's probability, by tenths",
        "how often it was right",
        series,
        percent=True,
        x_percent=True,
        diagonal=True,
        note="On the dashed line the head's probability is its rate of success. All positions.",
    )


def _gains(summary: Summary) -> Chart:
    return Chart(
        "gains",
        "Wider or deeper: tokens per verification",
        "draft position",
        "tokens per verification",
        [
            _by_position("wider: a rank-2 leaf", summary, [p.widening for p in summary.positions]),
            _by_position(
                "deeper: this position", summary, [p.unconditional for p in summary.positions]
            ),
        ]
        if any(p.widening for p in summary.positions)
        else [],
        note="The best leaf against the deepest position drafted: that is the question.",
    )


def _by_position(name: str, summary: Summary, estimates: Sequence[Estimate]) -> Series:
    return Series(name, _points(summary.positions, estimates))


def _points(
    positions: Sequence[Position], estimates: Sequence[Estimate], intervals: bool = True
) -> list[Point]:
    found = []
    for position, estimate in zip(positions, estimates, strict=True):
        if estimate is not None:
            bounds = estimate[1:] if intervals else ()
            found.append(Point(position.number, estimate.value, *bounds))
    return found


def speed(
    predicted: Sequence[tuple[str, Sequence[tuple[float, Estimate]]]],
    measured: Sequence[tuple[float, float]] = (),
    *,
    x_label: str = "nodes drafted",
) -> Chart:
    """Return a figure of a plan: predicted tokens/s over depth or node budget.

    ``predicted`` are families of policies by name, (x, estimate) of each; ``measured`` are (x,
    tokens/s) of what was really run.
    """
    series = [
        Series(name, [Point(x, *estimate) for x, estimate in points if estimate is not None])
        for name, points in predicted
    ]
    if measured:
        series.append(Series("measured", [Point(x, y) for x, y in measured], "dots"))
    return Chart("speed", "Predicted speed", x_label, "tokens/s", series)
