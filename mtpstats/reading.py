"""Text files of any origin: read whole, bounded, and as UTF-8 or not at all.

Whatever is wrong with one is an :class:`~mtpstats.errors.InputError` that names the file and, where
there is one, the line.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mtpstats.errors import InputError
from mtpstats.text import printable

MAX_BYTES = 64 << 20
"""A prompt file larger than this is a mistake: no context holds it, no patience runs it."""
MAX_FILES = 10_000

# Two, for a search that begins with one letter is ten times as fast.
_HUGE = re.compile(r"e\+?[0-9]{3}"), re.compile(r"E\+?[0-9]{3}")

PIPE_PATIENCE_S = 5.0
STDIN = Path("-")


def read(path: Path, limit: int = MAX_BYTES) -> str:
    """Return the text of a file, a pipe or, for ``-``, of standard input.

    Raises ``InputError`` for more than ``limit`` bytes, and for what is no text.
    """
    return decoded(content(path, limit), shown(path))


def content(path: Path, limit: int = MAX_BYTES) -> bytearray:
    """Return the bytes that :func:`decoded` takes, or as many as it needs to refuse them."""
    data = bytearray()
    for chunk in chunks(path, limit):
        data += chunk
        if b"\0" in chunk:  # /dev/zero has no end
            break
    return data


def chunks(path: Path, limit: int = MAX_BYTES) -> Iterator[bytes]:
    """Yield what is in a file, a pipe or, for ``-``, in standard input, piece by piece.

    Raises ``InputError`` when it turns out to hold more than ``limit`` bytes.
    """
    size = 0
    try:
        with _opened(path) as (fd, first):
            if os.fstat(fd).st_size <= limit:
                while chunk := first or os.read(fd, 1 << 20):
                    first = b""
                    size += len(chunk)
                    if size > limit:
                        break
                    yield chunk
                else:
                    return
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{shown(path)}: cannot be read: {reason}") from None
    most = f"{limit >> 20} MiB" if limit >> 20 else f"{limit:,} bytes"
    raise InputError(f"{shown(path)}: larger than {most}, more than can be read; take a part of it")


def loads(text: str, *, nan: bool = False) -> Any:
    """Return the JSON, in which no number is infinite or none; ``ValueError`` says what is wrong.

    Python's own reader lets NaN and 1e999 in, and its writer would not let them out again; integers
    that no float holds have no place in a sum. ``nan`` lets the words NaN and Infinity pass, which
    other programs write into fields that nobody reads.
    """
    # Asking each of many numbers takes a second.
    real, whole = (_finite, _whole) if _may_be_huge(text) else (None, None)
    word = None if nan else _no_number
    try:
        return json.loads(text, parse_constant=word, parse_float=real, parse_int=whole)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _may_be_huge(text: str) -> bool:
    """Whether there could be a number in it that no float holds."""
    # With an exponent below 100 it has 210 digits in a row, and so a hundred at a round place.
    rows = range(0, len(text), 100)
    return any(huge.search(text) for huge in _HUGE) or any(
        text[i : i + 100].isdigit() for i in rows
    )


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large")
    return number


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read it, without waiting for what a pipe, a device or a socket would send.

    Raises ``InputError`` for one of these, ``OSError`` as ``open`` does.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InputError(f"{shown(Path(path))}: not a regular file; copy it to one")
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def shown(path: Path) -> str:
    """Return the path as messages name it."""
    return "standard input" if path == STDIN else printable(str(path))


def files_below(directory: Path, wanted: Callable[[Path], object] | None = None) -> list[Path]:
    """Return the files of a directory and those below it, in the order of their names.

    Hidden ones, what is neither a file nor a link to one, and what is not ``wanted`` are left out.
    """
    found: list[Path] = []
    size = 0
    for place, inner, names in os.walk(directory, onerror=_unreadable):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in names:
            path = Path(place, name)
            if name.startswith(".") or not path.is_file():
                continue
            if wanted is None or wanted(path):
                found.append(path)
                size += path.stat().st_size
        if len(found) > MAX_FILES:
            raise InputError(f"{shown(directory)}: more than {MAX_FILES:,} files in it")
        if size > MAX_BYTES:
            raise InputError(f"{shown(directory)}: holds more than {MAX_BYTES >> 20} MiB")
    return sorted(found)


def _unreadable(error: OSError) -> None:
    where = shown(Path(error.filename))
    raise InputError(f"{where}: cannot be read: {error.strerror or error}") from None


def decoded(data: bytes | bytearray, where: str) -> str:
    """Return UTF-8, with or without a byte order mark, as text."""
    refuse_binary(data, where)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{where}: not UTF-8 at byte {error.start} (line {line}); convert it first"
        ) from None


def refuse_binary(data: bytes | bytearray, where: str) -> None:
    """Raise ``InputError`` for UTF-16 and for what holds a NUL, as no text does."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{where}: this is UTF-16; save it as UTF-8")
    nul = data.find(b"\0")
    if nul >= 0:
        line = data.count(b"\n", 0, nul) + 1
        raise InputError(f"{where}: holds a NUL byte (line {line}): not a text file")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, bytes]]:
    """Open a file or a pipe; yield its descriptor and what was read of it already."""
    if path == STDIN:
        _refuse_directory(0, path)
        yield 0, b""
        return
    # Non-blocking, because opening a pipe that nobody writes to would wait for ever.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_directory(fd, path)
        piped = stat.S_ISFIFO(os.fstat(fd).st_mode)
        first = _await_writer(fd, path) if piped else b""
        os.set_blocking(fd, True)
        yield fd, first
    finally:
        os.close(fd)


def _refuse_directory(fd: int, path: Path) -> None:
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        raise InputError(f"{shown(path)}: is a directory, not a file")


def _await_writer(fd: int, path: Path) -> bytes:
    """Wait until a pipe has data or a writer that will send some; return what was read."""
    if select.select([fd], [], [], PIPE_PATIENCE_S)[0]:
        return b""
    try:
        first = os.read(fd, 1)
    except BlockingIOError:
        return b""  # a writer has it open and is still thinking
    if not first:
        raise InputError(f"{shown(path)}: a pipe that nothing writes to")
    return first
