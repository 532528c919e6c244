"""A result's derived figures as JSON types: what a program reads instead of the tables."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

from mtpstats import result as results
from mtpstats.categories import of_categories
from mtpstats.intervals import Interval
from mtpstats.report import text
from mtpstats.summary import of_result
from mtpstats.verdict import deeper_or_wider

SCHEMA: Final = "mtpstats.report/1"


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """Return every figure of a run; an estimate is {value, lo, hi}, a missing number null.

    ``summary`` has the fields of :class:`mtpstats.summary.Summary`; positions count from 0 there.
    """
    timing, summary = results.timing(result), of_result(result)
    return {
        "schema": SCHEMA,
        "environment": result["environment"],
        "model": result["model"],
        "settings": result["settings"],
        "timing": plain(timing),
        "summary": plain(summary),
        "trees": plain(results.wood(result)),
        "categories": plain(of_categories(result)[0]),
        "remarks": text.remarks(result),
        "deeper_or_wider": None if summary is None else deeper_or_wider(summary, timing.speedup),
    }


def plain(value: Any) -> Any:
    """Return a dataclass and all that is in it as JSON types."""
    if isinstance(value, Interval):
        return plain(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
