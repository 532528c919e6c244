"""Where the result of a command goes."""

from __future__ import annotations

import sys
from typing import Any

from mtpstats.cli import options
from mtpstats.cli.streams import to_stdout
from mtpstats.errors import InputError, MtpStatsError


def check(output: options.OutputOptions) -> None:
    """Refuse before a long run what could not be written after it."""
    if output.output is None:
        if sys.stdout is None:
            raise InputError("standard output is closed and no -o FILE is given: nowhere to write")
        return
    if str(output.output) == "-":
        raise InputError("-o wants a file name; --json writes to standard output")

    from mtpstats import result

    result.check_writable(output.output)


def deliver(result: dict[str, Any], output: options.OutputOptions) -> None:
    """Write the file, then print; a file that fails at last does not take the table with it."""
    from mtpstats import result as results

    failure: MtpStatsError | None = None
    if output.output is not None:
        try:
            results.write(output.output, result)
        except MtpStatsError as error:
            failure = error
    if output.json:
        to_stdout(results.dumps(result))
    else:
        from mtpstats.report import text

        to_stdout(text.render(result))
    if failure is not None:
        raise failure
