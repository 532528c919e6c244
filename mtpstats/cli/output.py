"""Where the result of a command goes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from mtpstats.cli import options
from mtpstats.cli.streams import to_stdout
from mtpstats.errors import InputError, MtpStatsError

if TYPE_CHECKING:
    from mtpstats.journal import Journal


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


def journal(
    output: options.OutputOptions, resume: bool, tell: Callable[[str], None]
) -> AbstractContextManager[Journal | None]:
    """Return what opens the journal of a run; it is None where no file is written."""
    from mtpstats import result

    if output.output is None or not result.is_ordinary(output.output):
        if resume:
            raise InputError("--resume goes on with the run of a result file: name it with -o FILE")
        return nullcontext()

    from mtpstats.journal import Journal

    return Journal(output.output, resume, tell)


def deliver(
    result: dict[str, Any],
    output: options.OutputOptions,
    *,
    written: Callable[[], None] | None = None,
) -> None:
    """Write the file, then print; a file that fails at last does not take the table with it.

    ``written`` is called in between if there is a file and it did not fail.
    """
    from mtpstats import result as results

    failure: MtpStatsError | KeyboardInterrupt | None = None
    if output.output is not None:
        try:
            results.write(output.output, result)
        except (MtpStatsError, KeyboardInterrupt) as error:  # a pipe may be waited for
            failure = error
        else:
            if written is not None:
                written()
    if output.json:
        to_stdout(results.dumps(result))
    else:
        from mtpstats.report import text

        to_stdout(text.render(result))
    if failure is not None:
        raise failure
