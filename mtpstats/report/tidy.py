"""A result as CSV, one figure a line, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

from mtpstats import result as results
from mtpstats.categories import Category, of_categories
from mtpstats.report.numbers import Number
from mtpstats.summary import Estimate, Position, Summary, of_result
from mtpstats.text import printable

_Row: TypeAlias = tuple[str, int | None, Number, Number, Number]

HEADS = ("figure", "position", "value", "lo", "hi", "category")


def render(result: dict[str, Any]) -> str:
    """Return the figures; ``position`` counts from 1 and is empty for the whole run.

    ``category`` is empty for all prompts together, - for those without one. A missing number is an
    empty cell. There is no text of the model or the prompts in it.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADS)
    for row in _rows(result):
        writer.writerow((*row, None))
    for category in of_categories(result)[0]:
        name = "-" if category.name is None else printable(category.name)
        for row in _category(category):
            writer.writerow((*row, name))
    return out.getvalue()


def _rows(result: dict[str, Any]) -> Iterator[_Row]:
    summary = of_result(result)
    if summary is not None:
        yield from _run(summary)
    yield from _speed(results.timing(result), result["total"]["tokens"])
    if summary is not None:
        for position in summary.positions:
            yield from _position(position)


def _estimate(figure: str, position: int | None, estimate: Estimate) -> _Row:
    if estimate is None:
        return figure, position, None, None, None
    lo, hi = (None if math.isnan(bound) else bound for bound in estimate[1:])
    return figure, position, estimate.value, lo, hi


def _run(summary: Summary) -> Iterator[_Row]:
    for name in ("verifications", "drafted", "accepted"):
        yield name, None, getattr(summary, name), None, None
    for name in (
        *("acceptance", "acceptance_length", "coverage", "drafted_per_verification"),
        "expected_length",
    ):
        yield _estimate(name, None, getattr(summary, name))


def _speed(timing: results.Timing, tokens: int) -> Iterator[_Row]:
    yield "tokens", None, tokens, None, None
    for name in ("tokens_per_second", "baseline_tokens_per_second", "speedup"):
        yield name, None, getattr(timing, name), None, None
    for part, seconds in timing.seconds.items():
        yield f"seconds_{part}", None, seconds, None, None
    yield "seconds_prompt", None, timing.prompt_seconds, None, None


def _category(category: Category) -> Iterator[_Row]:
    yield "prompts", None, category.prompts, None, None
    yield "tokens", None, category.tokens, None, None
    yield _estimate("acceptance", 1, category.acceptance)
    yield _estimate("rank2", 1, category.rank2)
    yield _estimate("acceptance_length", None, category.acceptance_length)
    yield _estimate("coverage", None, category.coverage)


def _position(position: Position) -> Iterator[_Row]:
    at = position.number
    for name in ("drafted", "reached", "accepted"):
        yield name, at, getattr(position, name), None, None
    for name in ("acceptance", "unconditional", "survival", "widening", "p1", "p2"):
        yield _estimate(name, at, getattr(position, name))
    for name in ("p1_top10", "p2_top10", "stopped_hit"):
        yield _estimate(name, at, getattr(position, name))
    for rank, estimate in enumerate(position.ranks, 1):
        yield _estimate(f"rank{rank}", at, estimate)
    yield _estimate("miss", at, position.miss)
    for k, estimate in enumerate(position.recall, 1):
        yield _estimate(f"recall{k}", at, estimate)
