"""Charts as SVG, drawn by hand: no dependency, and the same drawing on the page and in a file.

Colours are CSS classes, so that one drawing serves light, dark and paper; see ``STYLE``.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final

from mtpstats.report.figures import Chart, Point, Series
from mtpstats.text import printable

WIDTH, HEIGHT = 480, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 22, 34, 66

# Classes s0, s1, ... colour lines and dots; r0 ... r7 and miss colour stacked bars.
_LIGHT: Final = {
    "ink": "#1f2328",
    "faint": "#d0d7de",
    "s0": "#0969da",
    "s1": "#bc4c00",
    "s2": "#1a7f37",
    "s3": "#8250df",
    "s4": "#bf3989",
    "miss": "#8c959f",
}
_DARK: Final = {
    "ink": "#e6edf3",
    "faint": "#3d444d",
    "s0": "#58a6ff",
    "s1": "#f0883e",
    "s2": "#3fb950",
    "s3": "#bc8cff",
    "s4": "#f778ba",
    "miss": "#6e7681",
}
_SERIES: Final = 5


def _rules(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


STYLE: Final = (
    f":root{{{_rules(_LIGHT)}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_rules(_DARK)}}}}}"
    ".chart text{fill:var(--ink);font:12px system-ui,sans-serif}"
    ".chart .title{font-weight:600;font-size:13px}"
    ".chart .grid{stroke:var(--faint);stroke-width:1}"
    ".chart .diagonal{stroke:var(--ink);stroke-width:1;stroke-dasharray:4 4;opacity:.6}"
    ".chart .line{fill:none;stroke-width:2}"
    ".chart .bar{stroke-width:1.5}"
    + "".join(
        f".chart .s{i}{{stroke:var(--s{i})}}.chart circle.s{i},.chart rect.s{i}{{fill:var(--s{i})}}"
        for i in range(_SERIES)
    )
    + "".join(f".chart .r{i}{{fill:var(--s0);fill-opacity:{1 - 0.115 * i:.3f}}}" for i in range(8))
    + ".chart .miss{fill:var(--miss)}"
)


def inline(chart: Chart) -> str:
    """Return a chart as an ``<svg>`` element; ``STYLE`` has to be on the page."""
    return _element(chart, f'viewBox="0 0 {WIDTH} {HEIGHT}"')


def sheet(all_charts: Sequence[Chart], title: str) -> str:
    """Return a whole SVG file with the charts two in a row."""
    columns = 2 if len(all_charts) > 1 else 1
    rows = -(-len(all_charts) // columns)
    width, height = WIDTH * columns, HEIGHT * rows + 30
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" class="chart" role="img">'
        f"<style>{STYLE}.chart .paper{{fill:#fff}}@media screen and (prefers-color-scheme:dark)"
        "{.chart .paper{fill:#0d1117}}</style>"
        f'<rect class="paper" width="{width}" height="{height}"/>'
        f'<text class="title" x="16" y="22">{_text(title)}</text>'
    ]
    for i, chart in enumerate(all_charts):
        at = f'x="{WIDTH * (i % columns)}" y="{HEIGHT * (i // columns) + 30}"'
        parts.append(_element(chart, f'{at} width="{WIDTH}" height="{HEIGHT}"'))
    return "".join(parts) + "</svg>\n"


def _text(text: str) -> str:
    return html.escape(printable(text))


def _element(chart: Chart, place: str) -> str:
    frame = _Frame(chart)
    bars = [series for series in chart.series if series.form == "bars"]
    others = [series for series in chart.series if series.form != "bars"]
    return (
        f'<svg class="chart" id="chart-{chart.name}" {place} role="img" '
        f'aria-label="{_text(chart.title)}">'
        f'<text class="title" x="8" y="18">{_text(chart.title)}</text>'
        + frame.axes()
        + frame.stacked(bars)
        + "".join(frame.drawn(series, i) for i, series in enumerate(others))
        + frame.legend(bars, others)
        + "</svg>"
    )


def ticks(high: float, most: int = 6) -> list[float]:
    """Return round numbers from 0 to the first one at or above ``high``."""
    if not high > 0 or not math.isfinite(high):
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(high / most))
    for factor in (1, 2, 2.5, 5, 10):
        if high / (factor * step) <= most:
            step *= factor
            break
    return [i * step for i in range(math.ceil(high / step - 1e-9) + 1)]


def highest(chart: Chart) -> float:
    """Return the highest value that a chart shows, its intervals included."""
    if any(series.form == "bars" for series in chart.series):
        return 1.0
    tops = [max(p.y, p.hi or p.y) for series in chart.series for p in series.points]
    top = max(tops, default=1.0)
    return min(1.0, top) if chart.percent and not chart.diagonal else max(top, chart.diagonal)


class _Frame:
    """The axes of one chart, and where numbers lie in them."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        self.y_ticks = ticks(highest(chart))
        xs = [point.x for series in chart.series for point in series.points]
        self.x_ticks = ticks(1.0) if chart.x_percent else [float(x) for x in sorted({*xs})]
        self.apart = 5.0  # pixels between series at one x, so that intervals can be told apart
        if len(self.x_ticks) > 16:
            self.x_ticks, self.apart = ticks(max(xs)), 0.0
        if chart.x_percent:
            self.x_range = 0.0, 1.0
        else:
            self.x_range = min(self.x_ticks) - 0.5, max(self.x_ticks) + 0.5

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        top = self.y_ticks[-1]
        return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> str:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        parts = []
        for value in self.y_ticks:
            y = f"{self.y(value):.1f}"
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}"/>')
            label = _tick(value, self.chart.percent)
            parts.append(f'<text x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{label}</text>')
        for value in self.x_ticks:
            parts.append(
                f'<text x="{self.x(value):.1f}" y="{bottom + 16}" text-anchor="middle">'
                f"{_tick(value, self.chart.x_percent)}</text>"
            )
        middle, half = (_LEFT + right) / 2, (_TOP + bottom) / 2
        parts.append(
            f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">'
            f"{_text(self.chart.x_label)}</text>"
            f'<text transform="translate(12 {half}) rotate(-90)" text-anchor="middle">'
            f"{_text(self.chart.y_label)}</text>"
        )
        if self.chart.diagonal:
            parts.append(
                f'<line class="diagonal" x1="{self.x(0):.1f}" y1="{self.y(0):.1f}" '
                f'x2="{self.x(1):.1f}" y2="{self.y(1):.1f}"/>'
            )
        return "".join(parts)

    def stacked(self, bars: Sequence[Series]) -> str:
        heights: dict[float, float] = {}
        parts = []
        for i, series in enumerate(bars):
            for point in series.points:
                base = heights.get(point.x, 0.0)
                heights[point.x] = base + point.y
                top = self.y(base + point.y)
                left, right = self.x(point.x - 0.4), self.x(point.x + 0.4)
                parts.append(
                    f'<rect class="{_bar_class(i, series)}" x="{left:.1f}" y="{top:.1f}" '
                    f'width="{right - left:.1f}" height="{self.y(base) - top:.1f}">'
                    f"{self._tip(series, point)}</rect>"
                )
        return "".join(parts)

    def drawn(self, series: Series, index: int) -> str:
        colour = f"s{index % _SERIES}"
        parts = []
        for point in series.points:
            if point.lo is not None and point.hi is not None and not math.isnan(point.lo):
                at = f"{self.x(point.x) + self.apart * index:.1f}"
                low, high = self.y(point.lo), self.y(min(point.hi, self.y_ticks[-1]))
                parts.append(
                    f'<line class="bar {colour}" x1="{at}" y1="{low:.1f}" x2="{at}" '
                    f'y2="{high:.1f}"/>'
                )
        places = [(self.x(p.x) + self.apart * index, self.y(p.y)) for p in series.points]
        if series.form == "line":
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        for point, (x, y) in zip(series.points, places, strict=True):
            parts.append(
                f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
                f"{self._tip(series, point)}</circle>"
            )
        return "".join(parts)

    def _tip(self, series: Series, point: Point) -> str:
        """Return what a pointer over the point is shown."""
        says = [_value(y, self.chart.percent) for y in point[1:] if y is not None]
        interval = f" ({says[1]} to {says[2]})" if len(says) == 3 else ""
        at = _tick(point.x, self.chart.x_percent)
        text = f"{series.name}, {self.chart.x_label} {at}: {says[0]}{interval}"
        return f"<title>{_text(text)}</title>"

    def legend(self, bars: Sequence[Series], others: Sequence[Series]) -> str:
        entries = [
            (_bar_class(i, series), series.name.removeprefix("rank "))
            for i, series in enumerate(bars)
        ]
        entries += [(f"s{i % _SERIES}", series.name) for i, series in enumerate(others)]
        parts: list[str] = []
        x = float(_LEFT)
        if bars:
            parts.append(f'<text x="{x - 30:.0f}" y="{HEIGHT - 8}">rank</text>')
        for colour, name in entries:
            parts.append(
                f'<rect class="{colour}" x="{x:.0f}" y="{HEIGHT - 18}" width="10" height="10"/>'
                f'<text x="{x + 14:.0f}" y="{HEIGHT - 8}">{_text(name)}</text>'
            )
            x += 24 + 6.4 * len(printable(name))
        return "".join(parts)


def _bar_class(index: int, series: Series) -> str:
    return "miss" if series.name == "miss" else f"r{index % 8}"


def _tick(value: float, percent: bool) -> str:
    return f"{100 * value:g} %" if percent else f"{value:g}"


def _value(value: float, percent: bool) -> str:
    if math.isnan(value):
        return "unknown"
    return f"{100 * value:.1f} %" if percent else f"{value:.3g}"
