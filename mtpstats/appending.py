"""Files that are only appended to: what was appended survives the death of the process."""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Final

from mtpstats import reading
from mtpstats.closing import Closing
from mtpstats.errors import InputError
from mtpstats.text import printable

try:
    import fcntl
except ImportError:  # not POSIX: two runs on one file are not noticed there
    fcntl = None  # type: ignore[assignment]

_SEAL: Final = re.compile(rb'(.*), "check": (\d{1,10})\}\n', re.DOTALL)


def seal(record: dict[str, Any]) -> bytes:
    """Return a JSON line, in ASCII, that ends in a checksum of itself."""
    body = json.dumps(record, allow_nan=False)[:-1].encode()
    return body + b', "check": %d}\n' % zlib.crc32(body)


def unsealed(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, None if its checksum is not right."""
    found = _SEAL.fullmatch(line)
    if found is None or zlib.crc32(found[1]) != int(found[2]):
        return None
    try:
        record: dict[str, Any] = reading.loads(line.decode())
    except ValueError:
        return None
    record.pop("check", None)
    return record


def _write(file: FileIO, data: bytes) -> None:
    """Write all of it; one call may take a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


class Removed(OSError):
    """Somebody removed the file while it was written, and it could not be put back."""


class AppendFile(Closing):
    """An open file that no other run writes to; ``end`` is where its whole records end.

    Args:
        path: the file, which must not exist if it is ``new``, and must if it is not. Of one that
            exists ``fileno`` may be read before :meth:`cut`.
        on_removed: hears, in a line, that somebody removed the file and it was put back.

    Raises:
        OSError: it cannot be opened.
        InputError: another run writes to it, or it is no file on a disk.
    """

    def __init__(
        self, path: Path, *, new: bool, on_removed: Callable[[str], None] | None = None
    ) -> None:
        self._path, self._on_removed = path, on_removed
        self._file = open(path, "x+b" if new else "r+b", buffering=0)  # noqa: SIM115
        self.end = 0
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise InputError(f"{printable(str(path))}: not a regular file")
            self._lock()
        except BaseException:
            self._file.close()
            raise
        if new:
            self._sync_name()

    def _sync_name(self) -> None:
        """See the file's name to the disk, too, where directories can be opened for that."""
        with suppress(OSError):
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            where = printable(str(self._path))
            raise InputError(f"{where}: another run is writing to it at the moment") from None
        except OSError:  # some file systems over a network have no locks
            pass

    def fileno(self) -> int:
        """Return the descriptor, to read from."""
        return self._file.fileno()

    def cut(self, end: int) -> None:
        """Forget what stands behind ``end``, and go on there."""
        self._file.truncate(end)
        self._file.seek(end)
        self.end = end

    def append(self, data: bytes) -> None:
        """Write a record and see it to the disk: it is there whole, or not at all.

        A file that somebody removed is put back with all that was in it. Raises OSError when that
        cannot be (:class:`Removed`), or the record cannot be written.
        """
        start = self.end
        try:
            _write(self._file, data)
            self.end += len(data)
            os.fsync(self._file.fileno())
        except BaseException as error:
            # An interruption that comes while the disk is waited for takes nothing back.
            if self.end == start or isinstance(error, OSError):
                with suppress(OSError):
                    self.cut(start)
                self.end = start
            raise
        if os.fstat(self._file.fileno()).st_nlink == 0:
            self._put_back()

    def _put_back(self) -> None:
        removed = self._file
        try:
            with ExitStack() as stack:
                file = stack.enter_context(open(self._path, "x+b", buffering=0))
                stack.callback(self._path.unlink)
                removed.seek(0)
                while block := removed.read(1 << 20):
                    _write(file, block)
                os.fsync(file.fileno())
                stack.pop_all()
        except OSError as error:
            self.end = 0
            why = f"somebody removed it, and it cannot be put back: {error.strerror}"
            raise Removed(error.errno, why) from None
        self._file = file
        removed.close()
        self._lock()
        self._sync_name()
        if self._on_removed is not None:
            where = printable(str(self._path))
            self._on_removed(f"{where}: was removed by somebody; it is there again")

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()
