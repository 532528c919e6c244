"""Options of commands that may run for hours, each defined once."""

from __future__ import annotations

from dataclasses import dataclass

from mtpstats.cli import values
from mtpstats.cli.groups import option


@dataclass(frozen=True)
class LongRunOptions:
    """How a run goes on where another one ended, and when it ends itself."""

    HEADING = "Long runs (every finished prompt is on disk before the next one starts)"

    resume: bool = option(
        "--resume",
        is_flag=True,
        help="Go on with the run that was to write the same -o file and was cut off: finished "
        "prompts are not run again. Everything else must be as it was.",
    )
    time_limit: float | None = option(
        "--time-limit",
        type=values.duration,
        default=None,
        metavar="TIME",
        help="End after this time, loading included, and keep what is finished: seconds, or with "
        "a unit as in 90s, 45m, 2h.  [default: no limit]",
    )
