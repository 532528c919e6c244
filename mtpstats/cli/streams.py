"""The standard streams, made safe: any encoding, closed ones, readers that go away.

``click.echo`` is not used for our own text: where the terminal's encoding is ASCII it writes UTF-8.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO

from mtpstats.text import printable


def prepare() -> None:
    """Make output safe in every encoding, and keep closed standard streams closed.

    A file opened later would otherwise get the number of a closed stream, and whatever C code
    prints would end up in it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def to_stdout(text: str) -> None:
    """Write to standard output; one that is closed or read no more is no error."""
    if sys.stdout is not None:
        try:
            sys.stdout.write(text)
        except BrokenPipeError:
            abandon(sys.stdout)


def to_stderr(text: str) -> None:
    """Write to standard error at once; one that is closed, full or read no more is no error.

    What is said there is worth less than the run that says it.
    """
    if sys.stderr is not None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            abandon(sys.stderr)


def show_log(level: str, line: str) -> None:
    """Write one line of llama.cpp's log."""
    to_stderr(f"llama.cpp {level}: {printable(line)}\n")


def last_words(text: str, rescue: Callable[[], str] | None = None) -> NoReturn:
    """End the process with llama.cpp's reason as one plain line; nothing more can run after it.

    ``rescue`` delivers what there is and says what that was.
    """
    saved = "nothing was written"
    try:
        if rescue is not None:
            try:
                saved = rescue()
            finally:  # a table may be printed whose file was not written
                flush()
    except BaseException as error:  # whatever it is, llama.cpp would abort the process
        saved = f"what was finished is lost: {printable(str(error))}"
    where = text.rsplit("/", 1)[-1].strip()
    cause = "a damaged model, too little memory, or an error of its own"
    if "rpc" in text.lower():
        cause = "a server of --rpc ended, broke off or speaks another version"
    to_stderr(f"mtpstats: error: llama.cpp gave up ({where}): {cause}; {saved}\n")
    os._exit(1)


def flush() -> None:
    """Write out what standard output still holds; a reader that went away does not want it."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            abandon(sys.stdout)


def discard() -> None:
    """Send what is still buffered nowhere, or the interpreter would complain at its end."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            abandon(stream)


def abandon(stream: TextIO) -> None:
    """Send what the stream holds, and all that follows, nowhere."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)
