"""Options of commands that write traces, each defined once."""

# ruff: noqa: RUF009  (option only wraps dataclasses.field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mtpstats.cli import values
from mtpstats.cli.groups import option


@dataclass(frozen=True)
class RecordOptions:
    """What is recorded."""

    HEADING = "Recording"

    output: Path = option(
        "-o",
        "--output",
        type=values.file(written=True),
        required=True,
        metavar="TRACE",
        help="The trace to write. One that exists is never overwritten.",
    )
    n_predict: int = option(
        "-n",
        "--predict",
        "--n-predict",
        type=values.whole(-1, 2**31 - 1),
        default=128,
        show_default=True,
        metavar="N",
        help="Tokens per prompt that a replay can generate; -1: until the model ends or the "
        "context is full. A few more are recorded.",
    )
    depth: int = option(
        "--depth",
        type=values.whole(1, 16),
        default=8,
        show_default=True,
        metavar="N",
        help="Draft steps recorded at each position: the longest draft that can be replayed.",
    )
    width: int = option(
        "--width",
        type=values.whole(0, 16),
        default=0,
        show_default=True,
        metavar="N",
        help="Also record what the head offers below its second and further choices, as far as "
        "the N most probable nodes of a depth go: trees grown while they are drafted (opttree, "
        "eagle2) can then be replayed. Slower and larger: see docs/planning.md.",
    )
    every: int = option(
        "--every",
        type=values.whole(1),
        default=1,
        show_default=True,
        metavar="N",
        help="Record at every Nth position: faster and smaller, enough for what the head is like "
        "and for trees, not for replaying a run.",
    )
    no_cost: bool = option(
        "--no-cost",
        is_flag=True,
        help="Do not measure first what target passes and head steps take here.",
    )
    cost_out: Path | None = option(
        "--cost-out",
        type=values.file(written=True),
        default=None,
        metavar="FILE",
        help="Also write the measured costs here, to plan with them on another machine.  "
        "[default: in the trace only]",
    )
