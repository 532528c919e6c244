"""A result as Markdown, for an issue or a pull request."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from mtpstats import result as results
from mtpstats.report import text
from mtpstats.report.numbers import counted, gain, percent, percent_interval, probability
from mtpstats.stats import SHOWN
from mtpstats.summary import Summary, of_result
from mtpstats.text import printable
from mtpstats.verdict import deeper_or_wider

_WIDE = 40  # columns of a count: more than any takes

_ALIGN = {"l": ":--", "r": "--:"}
# What Markdown, or HTML inside it, would act on; and what GitHub makes links of.
_SPECIAL = re.compile(r"([\\`*_{}\[\]#+!|~$^@]|^[-=]|(?<=www)\.|:(?=//))", re.IGNORECASE)
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")


def render(result: dict[str, Any]) -> str:
    """Return the whole report."""
    timing, summary = results.timing(result), of_result(result)
    parts = ["".join(f"- **{name}** {cell(value)}\n" for name, value in text.header_rows(result))]
    if summary is not None and summary.positions:
        parts += [_positions(summary), cell(text.LEGEND) + "\n"]
    if summary is not None and any(position.rank_counts for position in summary.positions):
        parts += ["Rank of the target's choice among the head's candidates:\n", _ranks(summary)]
    categories, more = text.category_rows(result)
    if categories:
        parts += [text.CATEGORIES.capitalize() + ":\n", _categories(categories, more)]
        parts.append(text.CATEGORY_LEGEND + "\n")
    totals = text.total_rows(timing, summary, results.wood(result))
    parts.append(table(("figure", "value"), [(name, cell(value)) for name, value in totals], "ll"))
    notes = [*(summary.warnings if summary else ()), *text.remarks(result)]
    if notes:
        parts.append("".join(f"- {cell(note)}\n" for note in notes))
    if summary is not None:
        answer = deeper_or_wider(summary, timing.speedup)
        parts.append(f"**Deeper or wider?** {cell(answer)}\n")
    return "\n".join(parts)


def _positions(summary: Summary) -> str:
    rows = [
        (
            str(position.number),
            counted(position.drafted, _WIDE),
            counted(position.reached, _WIDE),
            percent_interval(position.acceptance),
            probability(position.p1),
            probability(position.p2),
            percent(position.rank2),
            gain(position.unconditional),
            gain(position.widening),
        )
        for position in summary.positions
    ]
    heads = (
        "pos",
        "drafted",
        "reached",
        "accepted % (95 %)",
        "p1",
        "p2",
        "rank 2 %",
        "adds",
        "wider",
    )
    return table(heads, rows, "r" * len(heads))


def _ranks(summary: Summary) -> str:
    rows = [
        (
            str(position.number),
            *(
                counted(count, _WIDE)
                for count in (*(position.rank_counts or ()), position.miss_count)
            ),
            percent(position.recall[1]),
        )
        for position in summary.positions
    ]
    heads = "pos", *map(str, range(1, SHOWN + 1)), "miss", "1 or 2 %"
    return table(heads, rows, "r" * len(heads))


def _categories(rows: Sequence[Sequence[str]], more: int) -> str:
    escaped = [(cell(name), *cells) for name, *cells in rows]
    if more:
        escaped.append((f"and {more:,} more", *("" for _ in text.CATEGORY_HEADS[1:])))
    return table(text.CATEGORY_HEADS, escaped, "l" + "r" * (len(text.CATEGORY_HEADS) - 1))


def cell(text: str) -> str:
    """Return foreign text as Markdown that shows it as it is: no markup, no link, one line."""
    harmless = html.escape(printable(text), quote=False)
    return _NUMBERED.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", harmless))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Return a pipe table; ``align`` has an l or r for each column."""
    lines = [heads, [_ALIGN[side] for side in align], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
