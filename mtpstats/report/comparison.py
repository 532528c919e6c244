"""Comparisons for people: as text of at most 80 columns, as Markdown, and as JSON types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mtpstats.compare import FIGURES, Comparison, Difference
from mtpstats.report.derived import plain
from mtpstats.report.numbers import decimal, legend, plural, wrapped
from mtpstats.result import described
from mtpstats.text import printable

SCHEMA: Final = "mtpstats.comparison/1"

_LABEL: Final = 24
_RATES: Final = ("acceptance", "position")  # shown in percent
_NAMES: Final = {**FIGURES, "acceptance": "accepted of drafted, %"}
_LEGEND: Final = (
    "Change from A to B with its 95 % interval: tokens/s in percent, rates in percentage points. "
    "Better or worse where the interval lies on one side of 0; of many positions, one lies there "
    "by chance."
)


def render(comparisons: Sequence[Comparison]) -> str:
    """Return the text form: one block for each run that was compared with the first."""
    return "\n".join(_block(comparison) for comparison in comparisons)


def _block(comparison: Comparison) -> str:
    rows = [
        f"{'':<{_LABEL}}{'A':>8}{'B':>9}   {'change (95 %)':<26}verdict",
        *(_row(_NAMES[d.figure], d) for d in comparison.overall),
    ]
    if comparison.positions:
        rows += ["accepted of reached, %, by draft position"]
        rows += [_row(f"  {(d.position or 0) + 1}", d) for d in comparison.positions]
    head = [
        wrapped(f"A        {printable(comparison.a)}", " " * 9),
        wrapped(f"B        {printable(comparison.b)}", " " * 9),
        wrapped(f"paired   {_pairing(comparison)}", " " * 9),
        *(wrapped(f"differs  {text}", " " * 11) for text in _differing(comparison)),
    ]
    parts = ["".join(head), "\n".join(rows), legend(_LEGEND)]
    if comparison.remarks:
        parts.append("".join(wrapped(f"! {remark}", "  ") for remark in comparison.remarks))
    return "\n".join(parts)


def _row(label: str, difference: Difference) -> str:
    a, b, change = _cells(difference)
    return f"{label:<{_LABEL}}{a:>8}{b:>9}   {change:<26}{difference.verdict or ''}".rstrip()


def _cells(difference: Difference) -> tuple[str, str, str]:
    """Return A, B and the change as text."""
    is_rate = difference.figure in _RATES
    digits = 2 if difference.figure == "length" else 1
    a, b = (
        decimal(value * 100 if is_rate and value is not None else value, digits)
        for value in (difference.a, difference.b)
    )
    is_speed = difference.figure == "speed"
    change = difference.relative if is_speed else difference.change
    if change is None:
        return a, b, "-"
    value, lo, hi = (x * 100 if is_rate or is_speed else x for x in change)
    unit = " %" if is_speed else ""
    return a, b, f"{value:+.{digits}f}{unit} ({lo:+.{digits}f} to {hi:+.{digits}f})"


def _pairing(comparison: Comparison) -> str:
    if comparison.paired:
        return f"by prompt, {plural(comparison.prompts, 'prompt')}"
    return "no"


def _differing(comparison: Comparison) -> list[str]:
    return [f"{field}: {_quoted(a)} / {_quoted(b)}" for field, a, b in comparison.differs]


def _quoted(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_quoted, value)) or "none"
    text = value if isinstance(value, str) else described(value)
    text = printable(text)
    return text if len(text) <= 60 else text[:57] + "..."


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons as Markdown, for a pull request's comment."""
    from mtpstats.report.markdown import cell, table

    blocks = []
    for comparison in comparisons:
        rows = [(_NAMES[d.figure], *_cells(d), d.verdict or "") for d in comparison.overall]
        rows += [
            (f"accepted of reached, %, position {(d.position or 0) + 1}", *_cells(d), "")
            for d in comparison.positions
        ]
        lines = [
            f"**A** {cell(comparison.a)}  ",
            f"**B** {cell(comparison.b)}  ",
            f"Paired: {_pairing(comparison)}.",
            "",
            table(("figure", "A", "B", "change (95 %)", "verdict"), rows, "lrrrl"),
            *(f"- differs: {cell(text)}" for text in _differing(comparison)),
            *(f"- {cell(remark)}" for remark in comparison.remarks),
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def as_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the comparisons as JSON types."""
    return {
        "schema": SCHEMA,
        "comparisons": [
            {
                "a": c.a,
                "b": c.b,
                "prompts": c.prompts,
                "paired": c.paired,
                "differs": [{"field": field, "a": a, "b": b} for field, a, b in c.differs],
                "remarks": list(c.remarks),
                **{d.figure: plain(d) for d in c.overall},
                "positions": [plain(d) for d in c.positions],
            }
            for c in comparisons
        ],
    }
