"""Charts as a picture file. SVG is our own; PNG is drawn by matplotlib, which brings its fonts.

A PNG made of our SVG would need a renderer, and the fonts of the machine it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from mtpstats.errors import InputError
from mtpstats.report import svg
from mtpstats.report.figures import Chart
from mtpstats.text import printable

DPI = 150


def picture(path: Path, charts: Sequence[Chart], title: str) -> bytes:
    """Return the content of a picture file; its name's ending says of which kind.

    Raises InputError for another ending, for nothing to draw, and for a PNG without matplotlib.
    """
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise InputError(f"{printable(str(path))}: a picture's name ends in .svg or .png")
    if not charts:
        raise InputError("nothing to draw: the result holds no figures by position")
    return svg.sheet(charts, title).encode() if kind == ".svg" else _png(charts, title)


def _png(charts: Sequence[Chart], title: str) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "a .png needs matplotlib: pip install 'mtpstats[plot]'; a .svg needs nothing"
        ) from None
    columns = 2 if len(charts) > 1 else 1
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.6 * rows), layout="constrained")
    figure.suptitle(_plain(title), fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, chart in zip(axes, charts, strict=False):
        _draw(axis, chart)
    for axis in axes[len(charts) :]:
        axis.set_visible(False)
    out = BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": "mtpstats"})
    return out.getvalue()


def _plain(text: str) -> str:
    """Return foreign text that matplotlib does not take for mathematics."""
    return printable(text).replace("$", r"\$")


def _draw(axis: Any, chart: Chart) -> None:
    from matplotlib.ticker import PercentFormatter

    heights: dict[float, float] = {}
    for series in chart.series:
        xs, ys = [p.x for p in series.points], [p.y for p in series.points]
        if series.form == "bars":
            base = [heights.get(x, 0.0) for x in xs]
            axis.bar(xs, ys, 0.8, bottom=base, label=_plain(series.name))
            heights |= {x: low + y for x, low, y in zip(xs, base, ys, strict=True)}
            continue
        mark = "o" if series.form == "dots" else "o-"
        line = axis.plot(xs, ys, mark, markersize=4, label=_plain(series.name))[0]
        for point in series.points:
            if point.lo is not None and point.hi is not None:
                axis.plot([point.x] * 2, point[2:], color=line.get_color(), linewidth=1)
    if chart.diagonal:
        axis.plot([0, 1], [0, 1], "--", color="grey", linewidth=1)
    axis.set(title=_plain(chart.title), xlabel=_plain(chart.x_label), ylabel=_plain(chart.y_label))
    axis.set_ylim(0, svg.ticks(svg.highest(chart))[-1])
    if chart.percent:
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    if chart.x_percent:
        axis.xaxis.set_major_formatter(PercentFormatter(1.0))
    axis.grid(axis="y", linewidth=0.5)
    axis.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.14))
