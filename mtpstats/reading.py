"""Text files of any origin: read whole, bounded, and as UTF-8 or not at all.

Whatever is wrong with one is an :class:`~mtpstats.errors.InputError` that names the file and, where
there is one, the line.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Callable
from pathlib import Path

from mtpstats.errors import InputError
from mtpstats.text import printable

MAX_BYTES = 64 << 20
"""A prompt file larger than this is a mistake: no context holds it, no patience runs it."""
MAX_FILES = 10_000

PIPE_PATIENCE_S = 5.0
STDIN = Path("-")


def read(path: Path) -> str:
    """Return the text of a file, a pipe or, for ``-``, of standard input."""
    return decoded(_read(path), shown(path))


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


def decoded(data: bytes, where: str) -> str:
    """Return UTF-8, with or without a byte order mark, as text."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{where}: this is UTF-16; save it as UTF-8")
    nul = data.find(b"\0")
    if nul >= 0:
        line = data.count(b"\n", 0, nul) + 1
        raise InputError(f"{where}: holds a NUL byte (line {line}): not a text file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{where}: not UTF-8 at byte {error.start} (line {line}); convert it first"
        ) from None


def _read(path: Path) -> bytes:
    """Return what is in a file or pipe, of at most ``MAX_BYTES``."""
    try:
        if path == STDIN:
            return _read_fd(0, path)
        # Non-blocking, because opening a pipe that nobody writes to would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            piped = stat.S_ISFIFO(os.fstat(fd).st_mode)
            first = _await_writer(fd, path) if piped else b""
            os.set_blocking(fd, True)
            return first + _read_fd(fd, path)
        finally:
            os.close(fd)
    except OSError as error:
        raise InputError(f"{shown(path)}: cannot be read: {error.strerror or error}") from None


def _read_fd(fd: int, path: Path) -> bytes:
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        raise InputError(f"{shown(path)}: is a directory, not a file")
    data = bytearray()
    size = found.st_size
    while size <= MAX_BYTES:
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            return bytes(data)
        data += chunk
        size = len(data)
    raise InputError(
        f"{shown(path)}: larger than {MAX_BYTES >> 20} MiB, more than can be run; take a part of it"
    )


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
