"""Options of how results and comparisons are shown, each defined once."""

# ruff: noqa: RUF009  (option only wraps dataclasses.field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from mtpstats.cli import values
from mtpstats.cli.groups import option


@dataclass(frozen=True)
class CompareOptions:
    """What a comparison must not show."""

    HEADING = "Check"

    fail_if_worse: float | None = option(
        "--fail-if-worse",
        type=values.share,
        default=None,
        metavar="PERCENT",
        help="End with exit code 3 if a result is worse than the first by more than this, beyond "
        "chance.  [default: no check]",
    )
    fail_on: tuple[str, ...] = option(
        "--fail-on",
        type=click.Choice(["length", "acceptance", "speed"]),
        multiple=True,
        default=("length",),
        help="Which figure is checked: mean acceptance length, accepted of drafted, tokens/s. "
        "Repeatable.  [default: length]",
    )


@dataclass(frozen=True)
class ReportForm:
    """How a result is shown."""

    HEADING = "Output (one form; text if none is asked for)"

    markdown: bool = option("--markdown", is_flag=True, help="Print Markdown.")
    csv: bool = option("--csv", is_flag=True, help="Print every figure as a line of CSV.")
    json: bool = option("--json", is_flag=True, help="Print every figure as JSON.")
    html: Path | None = option(
        "--html",
        type=values.file(written=True),
        metavar="FILE",
        help="Write one self-contained page with figures.  [default: none]",
    )
    plot: Path | None = option(
        "--plot",
        type=values.file(written=True),
        metavar="FILE",
        help="Write the figures as a picture, .svg or .png (which needs matplotlib).  "
        "[default: none]",
    )
    plan: Path | None = option(
        "--plan",
        type=values.file(),
        metavar="FILE",
        help="Also draw the predicted speeds of a plan, of plan -o.  [default: none]",
    )
    validation: Path | None = option(
        "--validation",
        type=values.file(),
        metavar="FILE",
        help="And what was measured, of validate -o.  [default: none]",
    )


@dataclass(frozen=True)
class ComparisonForm:
    """How a comparison is printed."""

    HEADING = "Output"

    markdown: bool = option("--markdown", is_flag=True, help="Print Markdown instead of text.")
    json: bool = option("--json", is_flag=True, help="Print JSON instead of text.")
