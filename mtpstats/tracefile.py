"""The file of a trace: a stream that is only appended to, read with suspicion.

A line of JSON, then for each prompt a line of JSON and its arrays as plain ``.npy``;
``docs/files.md`` describes it.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from mtpstats import reading
from mtpstats.appending import AppendFile, Removed, seal, unsealed
from mtpstats.closing import Closing
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.text import printable
from mtpstats.trace import (
    BEAM_ARRAYS,
    RANKS,
    SCHEMA,
    UNKNOWN,
    Trace,
    TracedPrompt,
    arrays_of,
    check_header,
    off_path,
)

__all__ = ["SAME", "TraceReader", "TraceWriter", "begun", "check_new", "load"]

GATES: Final = 3  # candidates kept where only the greedy path goes
MAX_LINE: Final = 16 << 20

# What a resumed recording must have in common with what the file holds.
SAME: Final = (
    "schema", "width", "arrays", "depth", "every", "n_predict", "head", "sampling", "settings",
)  # fmt: skip


def load(path: str | os.PathLike[str]) -> Trace:
    """Return what is in a file; see :meth:`mtpstats.trace.Trace.load`."""
    where = printable(os.fspath(path))
    try:
        with reading.open_regular(path) as file:
            return TraceReader(file, where).trace()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{where}: cannot be read: {reason}") from None


class _Cut(Exception):
    """The file ends inside a record."""


class TraceReader:
    """Reads a trace file from its start; ``end`` is where its whole records end."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self.file, self.where, self.size = file, where, os.fstat(file.fileno()).st_size
        self.end = 0

    def header(self) -> dict[str, Any]:
        """Return the first line; InputError for anything else than a trace."""
        line = self.file.readline(MAX_LINE)
        if not line:
            raise InputError(f"{self.where}: the file is empty")
        if _starts_like_a_header(line):
            raise InputError(f"{self.where}: cut off inside its header: nothing was recorded")
        try:
            header = reading.loads(line.decode())
        except ValueError:
            header = None
        if not isinstance(header, dict) or not str(header.get("schema")).startswith("mtpstats."):
            raise InputError(f"{self.where}: not a trace of mtpstats")
        if header["schema"] != SCHEMA:
            raise InputError(
                f"{self.where}: schema {printable(repr(header['schema']))} is unknown; "
                f"this version reads {SCHEMA}"
            )
        header = unsealed(line)
        if header is None:
            raise InputError(f"{self.where}: the header is damaged: its checksum is not right")
        check_header(header, self.where)
        self.end = self.file.tell()
        return header

    def trace(self) -> Trace:
        """Return all of it."""
        header = self.header()
        prompts: list[TracedPrompt] = []
        incomplete = None
        while self.end < self.size:
            place = f"{self.where}: prompt {len(prompts) + 1}"
            try:
                prompts.append(self._prompt(header, place))
            except _Cut:
                incomplete = f"prompt {len(prompts) + 1} is cut off at byte {self.size}: left out"
                break
            self.end = self.file.tell()
        try:
            return Trace(header, prompts, incomplete=incomplete)
        except InputError as error:
            raise InputError(f"{self.where}: {error}") from None

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the line of every prompt after the header; ``end`` is where its record ends.

        The arrays are checked for damage, not for sense. Raises ``InputError`` also for a file
        that is cut off.
        """
        number = 0
        while self.end < self.size:
            number += 1
            place = f"{self.where}: prompt {number}"
            try:
                record, _ = self._record(place)
            except _Cut:
                raise InputError(
                    f"{place} is cut off: go on with the recording first (--resume)"
                ) from None
            self.end = self.file.tell()
            yield record

    def _record(self, place: str) -> tuple[dict[str, Any], bytes]:
        line = self.file.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            if len(line) < MAX_LINE and line.isascii() and line.startswith(b"{"):
                raise _Cut
            raise InputError(f"{place}, byte {self.end}: damaged: no line of JSON")
        record = unsealed(line)
        if record is None:
            raise InputError(f"{place}, byte {self.end}: damaged: its checksum is not right")
        size = record.get("bytes")
        if type(size) is not int or size < 0:
            raise InputError(f"{place}: bytes is {printable(repr(size))[:40]}")
        if size > self.size - self.file.tell():
            raise _Cut
        data = self.file.read(size)
        if zlib.crc32(data) != record.get("crc32"):
            raise InputError(f"{place}: damaged: the checksum of its arrays is not right")
        return record, data

    def _prompt(self, header: dict[str, Any], place: str) -> TracedPrompt:
        record, data = self._record(place)
        try:
            width = header.get("width", 0)
            return _unpacked(record, _read_arrays(data, width), header["depth"], width)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None


def _starts_like_a_header(line: bytes) -> bool:
    """Whether the line is one of ours that lacks its end."""
    start = b'{"schema": "mtpstats.trace/'
    return not line.endswith(b"\n") and line.isascii() and start.startswith(line[: len(start)])


def _read_arrays(data: bytes, width: int) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of a record, which may promise what it does not hold."""
    file = io.BytesIO(data)
    arrays = {}
    for name, (dtype, ndim) in arrays_of(width).items():
        try:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"npy version {version} is not 1.0")
            shape, by_column, found = np.lib.format.read_array_header_1_0(file)
        except ValueError as error:
            raise InputError(f"{name}: {printable(str(error))[:200]}") from None
        count = 1
        for length in shape:
            count *= length
        if found != np.dtype(dtype) or len(shape) != ndim or by_column or min(shape) < 0:
            raise InputError(
                f"{name} is {found}{list(shape)}, not {ndim} dimensions of {dtype.__name__}"
            )
        size = count * found.itemsize
        if size > len(data) - file.tell():
            raise InputError(f"{name} is larger than its record")
        arrays[name] = np.frombuffer(file.read(size), found).reshape(shape)
    if file.tell() != len(data):
        raise InputError("bytes follow the last array")
    return arrays


def _packed(prompt: TracedPrompt) -> bytes:
    """Return the record of a prompt."""
    known = prompt.rank != UNKNOWN
    on = known & ~off_path(prompt.rank)
    path_p = prompt.p[known]
    path_p[~on[known]] = prompt.off_p
    arrays = {
        "tokens": prompt.tokens,
        "margin": prompt.margin,
        "roots": prompt.roots,
        "rank": prompt.rank,
        "p_min_p": prompt.p_min_p,
        "path_p": path_p,
        "path_overlap": prompt.overlap[known],
        "off_top10": prompt.off_top10,
        "greedy_p": prompt.p[~on][:, :GATES].astype(np.float16),
        "beam_node": prompt.beam_node,
        "beam_p": prompt.beam_p,
    }
    file = io.BytesIO()
    for name, (dtype, _) in arrays_of(prompt.width).items():
        little = arrays[name].astype(np.dtype(dtype).newbyteorder("<"), copy=False)
        np.lib.format.write_array(file, little, version=(1, 0), allow_pickle=False)
    data = file.getvalue()
    line = seal(
        {
            "id": prompt.id,
            "category": prompt.category,
            "n_prompt": prompt.n_prompt,
            "stop": prompt.stop,
            "n_ctx": prompt.n_ctx,
            "seconds": prompt.seconds,
            "facts": prompt.facts,
            "n_roots": len(prompt.roots),
            "bytes": len(data),
            "crc32": zlib.crc32(data),
        }
    )
    return line + data


def _unpacked(
    record: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], depth: int, width: int
) -> TracedPrompt:
    for key, kinds in (
        ("id", (str,)),
        ("category", (str, type(None))),
        ("n_prompt", (int,)),
        ("stop", (str,)),
        ("n_ctx", (int,)),
        ("seconds", (float, int)),
        ("facts", (dict,)),
    ):
        if type(record.get(key)) not in kinds:
            raise InputError(f"{key} is {printable(repr(record.get(key)))[:40]}")
    rank = arrays["rank"]
    if rank.shape[1] != depth:
        raise InputError(f"rank has shape {rank.shape}, expected {(len(rank), depth)}")
    known = rank != UNKNOWN
    on = known & ~off_path(rank)
    n_known, n_on = int(known.sum()), int(on.sum())
    for name, shape in (
        ("p_min_p", rank.shape),
        ("path_p", (n_known, RANKS)),
        ("path_overlap", (n_known,)),
        ("off_top10", (n_known - n_on,)),
        ("greedy_p", (rank.size - n_on, GATES)),
    ):
        if arrays[name].shape != shape:
            raise InputError(f"{name} has shape {arrays[name].shape}, expected {shape}")
    p = np.full((*rank.shape, RANKS), np.nan, np.float32)
    rest = np.full((rank.size - n_on, RANKS), np.nan, np.float32)
    rest[:, :GATES] = arrays["greedy_p"]
    p[~on] = rest
    p[on] = arrays["path_p"][on[known]]
    top10 = np.full(rank.shape, np.nan, np.float32)
    with np.errstate(all="ignore"):  # what makes no sense is refused with the rest
        np.divide(p[:, :, 0], arrays["p_min_p"], out=top10, where=on & (arrays["p_min_p"] > 0))
    overlap = np.full(rank.shape, np.nan, np.float32)
    overlap[known] = arrays["path_overlap"]
    return TracedPrompt(
        id=record["id"],
        category=record.get("category"),
        n_prompt=record["n_prompt"],
        stop=record["stop"],
        n_ctx=record["n_ctx"],
        seconds=record["seconds"],
        tokens=arrays["tokens"],
        margin=arrays["margin"],
        roots=arrays["roots"],
        rank=rank,
        p=p,
        top10=top10,
        p_min_p=arrays["p_min_p"],
        off_index=np.flatnonzero(known & ~on).astype(np.int32),
        off_p=arrays["path_p"][~on[known]],
        off_top10=arrays["off_top10"],
        overlap=overlap,
        facts=record["facts"],
        width=width,
        **{name: arrays[name] for name in (BEAM_ARRAYS if width else ())},
    )


def _exists(where: str, resumable: bool = True) -> InputError:
    advice = "go on with it (--resume), " if resumable else ""
    return InputError(f"{where}: exists already; {advice}remove it, or name another file")


def check_new(path: str | os.PathLike[str], resumable: bool = True) -> None:
    """Raise ``InputError`` now if a :class:`TraceWriter` would refuse to begin there later."""
    if os.path.lexists(path):
        raise _exists(printable(os.fspath(path)), resumable)


def begun(path: str | os.PathLike[str]) -> Trace | None:
    """Return the trace to go on with; None if the file is missing or has not its first line whole.

    Raises ``InputError`` for anything else than a trace.
    """
    try:
        with reading.open_regular(path) as file:
            start = file.readline(MAX_LINE)
    except FileNotFoundError:
        return None
    except OSError as error:
        where = printable(os.fspath(path))
        raise InputError(f"{where}: cannot be read: {error.strerror or error}") from None
    return None if not start or _starts_like_a_header(start) else Trace.load(path)


class TraceWriter(Closing):
    """Appends prompts to a trace file; what was appended survives the death of the process.

    Args:
        path: a new file; one that exists is only touched with ``resume``.
        header: see :func:`trace_header`.
        resume: go on with a file of the same recording: what is cut off at its end is removed.
            A file that is not there yet is begun.
        on_removed: hears, in a line, that somebody removed the file and it was put back.

    Raises:
        InputError: the file exists, cannot be written, is damaged, is written by another run, or
            its header differs in what decides the numbers; the message names the key.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: dict[str, Any],
        resume: bool = False,
        on_removed: Callable[[str], None] | None = None,
    ) -> None:
        check_header(header, "trace header")
        self.path = Path(path)
        self.header = header
        self.done_ids: set[str] = set()
        """Prompts the file holds."""
        self._where = printable(str(path))
        new = not (resume and self.path.exists())
        try:
            self._file = AppendFile(self.path, new=new, on_removed=on_removed)
        except FileExistsError:
            raise _exists(self._where) from None
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            if not new:
                self._file.cut(self._resumed())
            if self._file.end == 0:
                self._file.append(seal(header))
        except BaseException as error:
            self.close()
            if new:
                self.path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._unwritable(error) from None
            raise

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"{self._where}: cannot be written: {error.strerror or error}")

    def _resumed(self) -> int:
        """Take over what the file holds; return where its whole records end."""
        with open(self._file.fileno(), "rb", closefd=False) as file:
            start = file.readline(MAX_LINE)
            if not start or _starts_like_a_header(start):
                return 0
            file.seek(0)
            reader = TraceReader(file, self._where)
            found = reader.trace()
            self._compare(found.header)
            self.header = found.header
            self.done_ids = {prompt.id for prompt in found.prompts}
            return reader.end

    def _compare(self, found: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps(self.header))
        for key in SAME:
            if found.get(key) != wanted.get(key):
                ours, theirs = found.get(key), wanted.get(key)
                if isinstance(ours, dict) and isinstance(theirs, dict):
                    inner = next(k for k in {**ours, **theirs} if ours.get(k) != theirs.get(k))
                    key, ours, theirs = f"{key}.{inner}", ours.get(inner), theirs.get(inner)
                raise InputError(
                    f"{self._where}: was recorded with {key} {printable(repr(ours))[:60]}, not "
                    f"{printable(repr(theirs))[:60]}: it cannot be resumed so"
                )
        models = [(h.get("model") or {}).get("sha256") for h in (found, wanted)]
        if models[0] != models[1]:
            raise InputError(f"{self._where}: was recorded with another model")

    def append(self, prompt: TracedPrompt) -> None:
        """Write a prompt and see it to the disk: it is there whole, or not at all.

        Raises ``InputError`` for a prompt of another depth or width, ``MtpStatsError`` when it
        cannot be written.
        """
        for key, value in (("depth", prompt.depth), ("width", prompt.width)):
            if value != self.header.get(key, 0):
                raise InputError(
                    f"prompt {printable(prompt.id)}: {key} is {value}, the header says "
                    f"{self.header.get(key, 0)}"
                )
        end = self._file.end
        try:
            self._file.append(_packed(prompt))
        except Removed as error:
            self.done_ids.clear()
            raise MtpStatsError(f"{self._where}: {error.strerror}") from None
        except OSError as error:
            raise MtpStatsError(
                f"{self._where}: not written: {error.strerror or error}; what was recorded before "
                "is kept"
            ) from None
        finally:
            if self._file.end > end:
                self.done_ids.add(prompt.id)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()
