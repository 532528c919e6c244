"""A result as one HTML file: no script, nothing loaded, light and dark, fit for paper."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from mtpstats import result as results
from mtpstats.report import svg, text
from mtpstats.report.figures import Chart, charts
from mtpstats.report.numbers import counted, gain, percent, percent_interval, probability
from mtpstats.stats import SHOWN
from mtpstats.summary import Summary, of_result
from mtpstats.text import printable
from mtpstats.verdict import deeper_or_wider

_WIDE = 40
_PRIVATE = ("command", "merged")  # command lines may hold prompts, and reports are passed on
_OPEN = 100  # rows: a longer table starts folded

# Nothing may be fetched and no script may run, whatever the result's strings say.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE = (
    svg.STYLE
    + """
:root{--paper:#fff}
@media screen and (prefers-color-scheme:dark){:root{--paper:#0d1117}}
html{color-scheme:light dark}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:64rem;margin:0 auto;padding:1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
.answer,.note{border-left:4px solid var(--s0);padding:.4rem .8rem;margin:.6rem 0}
.note{border-color:var(--s1)}
.figures{display:grid;margin-top:1rem;grid-template-columns:repeat(auto-fit,minmax(22rem,1fr));gap:1rem}
figure{margin:0;border:1px solid var(--faint);border-radius:6px;padding:.5rem}
figcaption,.legend{font-size:.85rem}
figure svg{width:100%;height:auto}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.15rem .6rem;text-align:right;border-bottom:1px solid var(--faint)}
th{font-weight:600}
th.left,td.left{text-align:left;overflow-wrap:anywhere}
footer{margin-top:2rem;font-size:.85rem}
@media print{html{color-scheme:light}main{max-width:none;padding:0}
figure,tr{break-inside:avoid}h2{break-after:avoid}.scroll{overflow:visible}}
"""
)


def render(result: dict[str, Any], more: Sequence[Chart] = ()) -> str:
    """Return the page; ``more`` are charts beside those of the result, such as a plan's."""
    timing, summary = results.timing(result), of_result(result)
    name = result["model"]["file"] or "unknown model"
    notes = [*(summary.warnings if summary else ()), *text.remarks(result)]
    figures = [*(charts(summary) if summary else ()), *more]
    parts = [f"<h1>{_escaped(name)}</h1>"]
    if summary is not None:
        answer = _escaped(deeper_or_wider(summary, timing.speedup))
        parts.append(f'<p class="answer"><strong>Deeper or wider?</strong> {answer}</p>')
    parts += [f'<p class="note">{_escaped(note)}</p>' for note in notes]
    parts.append(_table((), text.header_rows(result), 2))
    if figures:
        parts.append(f'<div class="figures">{"".join(map(_figure, figures))}</div>')
    if summary is not None and summary.positions:
        parts += ["<h2>By draft position</h2>", _positions(summary)]
        parts.append(f'<p class="legend">{_escaped(text.LEGEND)}</p>')
    if summary is not None and any(position.rank_counts for position in summary.positions):
        parts += ["<h2>Rank of the target's choice among the head's candidates</h2>"]
        parts.append(_ranks(summary))
    categories, unshown = text.category_rows(result)
    if categories:
        parts += ["<h2>By category</h2>", _table(text.CATEGORY_HEADS, categories, 1)]
        rest = f" And {unshown:,} more." if unshown else ""
        legend = f"{text.CATEGORIES.capitalize()}; {text.CATEGORY_LEGEND}{rest}"
        parts.append(f'<p class="legend">{_escaped(legend)}</p>')
    totals = text.total_rows(timing, summary, results.wood(result))
    parts += ["<h2>The whole run</h2>", _table((), totals, 2)]
    parts += ["<h2>Prompts</h2>", _prompts(result["prompts"])]
    parts += ["<h2>Settings and environment</h2>", _everything(result)]
    made = f"mtpstats {result['environment']['mtpstats']}, {result['environment']['time'] or ''}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>mtpstats: {_escaped(name)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + f"\n<footer>{_escaped(made.rstrip(', '))}</footer>\n</main></body></html>\n"
    )


def _escaped(value: object) -> str:
    """Return foreign text that is text and nothing else in a page."""
    return html.escape(printable(str(value)))


def _figure(chart: Chart) -> str:
    return f"<figure>{svg.inline(chart)}<figcaption>{_escaped(chart.note)}</figcaption></figure>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0) -> str:
    """Return a table; its first ``left`` columns are text. Without heads a row's first is one."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag if i else 'th'}{' class=left' if i < left else ''}>{_escaped(cell)}"
            f"</{tag if i else 'th'}>"
            for i, cell in enumerate(row)
        )

    head = f"<thead><tr>{cells(heads, 'th')}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _positions(summary: Summary) -> str:
    return _table(
        ("pos", "drafted", "reached", "accepted % (95 %)", "p1", "p2", "rank 2 %", "adds", "wider"),
        [
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
        ],
    )


def _ranks(summary: Summary) -> str:
    heads = "pos", *map(str, range(1, SHOWN + 1)), "miss", "1 or 2 %"
    return _table(
        heads,
        [
            (
                str(position.number),
                *(counted(n, _WIDE) for n in (*(position.rank_counts or ()), position.miss_count)),
                percent(position.recall[1]),
            )
            for position in summary.positions
        ],
    )


def _prompts(prompts: Sequence[dict[str, Any]]) -> str:
    """Return what became of each prompt, without its text."""
    columns = "n_prompt", "tokens", "verifications", "drafted", "accepted", "near_ties"
    rows = [
        (
            prompt["id"],
            prompt["category"] or "-",
            *(counted(prompt[column], _WIDE) for column in columns),
            "-" if prompt["repeated_4grams"] is None else f"{prompt['repeated_4grams']:.1%}",
            prompt["stop"] or "-",
        )
        for prompt in prompts
    ]
    heads = (
        *("id", "category", "prompt tokens", "tokens", "verifications", "drafted", "accepted"),
        *("near ties", "repeated 4-grams", "ended by"),
    )
    table = _table(heads, rows, 2)
    if len(rows) <= _OPEN:
        return table
    return f"<details><summary>{len(rows):,} prompts</summary>{table}</details>"


def _everything(result: dict[str, Any]) -> str:
    rows = [
        (f"{part}.{key}", value if isinstance(value, str) else json.dumps(value))
        for part in ("model", "settings", "environment")
        for key, value in result[part].items()
        if key not in _PRIVATE
    ]
    return f"<details><summary>all of it</summary>{_table((), rows, 2)}</details>"
