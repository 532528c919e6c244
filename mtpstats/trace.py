"""Traces: what a recording holds, in memory and in its file.

A trace has, for every root of every text, the rank of the target's choices along the forced path
and the head's probabilities along its own greedy path, so that any drafting policy can be replayed
from it (DESIGN section 4). A root ``t`` is the text position of ``id_last``; the head's step ``d``
guesses ``tokens[t + 1 + d]``. ``docs/files.md`` describes the file.
"""

from __future__ import annotations

import io
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mtpstats.appending import AppendFile, Removed, seal, unsealed
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.generation import NEAR_TIE
from mtpstats.text import printable

__all__ = [
    "MISS",
    "NEAR_TIE",
    "UNKNOWN",
    "Trace",
    "TraceWriter",
    "TracedPrompt",
    "quantise",
    "trace_header",
]

SCHEMA: Final = "mtpstats.trace/1"
MAX_DEPTH: Final = 16
MAX_ROOTS: Final = 1 << 23  # of one text
RANKS: Final = 8  # candidates kept at a position
GATES: Final = 3  # of those, kept where only the greedy path goes
MISS: Final = 0
UNKNOWN: Final = 255
STOPS: Final = ("eog", "n_predict", "context", "nan")
MAX_LINE: Final = 16 << 20

Int32: TypeAlias = npt.NDArray[np.int32]
UInt8: TypeAlias = npt.NDArray[np.uint8]
Float32: TypeAlias = npt.NDArray[np.float32]

# Name, dtype and number of dimensions of each array in the file, in its order.
_ARRAYS: Final[tuple[tuple[str, type[np.generic], int], ...]] = (
    ("tokens", np.int32, 1),
    ("margin", np.float32, 1),
    ("roots", np.int32, 1),
    ("rank", np.uint8, 2),
    ("p_min_p", np.float32, 2),
    ("path_p", np.float32, 2),
    ("path_overlap", np.float32, 1),
    ("off_top10", np.float32, 1),
    ("greedy_p", np.float16, 2),
)
ARRAYS: Final = tuple(name for name, _, _ in _ARRAYS)

# What a resumed recording must have in common with what the file holds.
SAME: Final = ("schema", "arrays", "depth", "every", "n_predict", "head", "sampling", "settings")


def quantise(p: npt.ArrayLike) -> Float32:
    """Probabilities as float32 multiples of 2**-24, NaN kept: the units live counters add up.

    With ``p`` in a trace rounded so (once, from float64), replay adds exactly what a live
    collector adds.
    """
    return (np.rint(np.asarray(p, np.float64) * 2.0**24) * 2.0**-24).astype(np.float32)


def _off_path(rank: UInt8) -> npt.NDArray[np.bool_]:
    """Where a rank that is not 1 stands before, [R, D]."""
    off = np.zeros(rank.shape, np.bool_)
    np.logical_or.accumulate(rank[:, :-1] != 1, axis=1, out=off[:, 1:])
    return off


@dataclass(frozen=True, eq=False)
class TracedPrompt:
    """One recorded text: R roots, D depths. Arrays are taken over as they are, not copied.

    Raises ``InputError`` for arrays that do not fit each other.
    """

    id: str
    category: str | None
    n_prompt: int
    """Tokens of the prompt; the first root can be ``n_prompt - 1``."""
    stop: str
    """Why the text ends: ``eog`` (the last token is end of generation), ``n_predict`` (as much as
    was asked for), ``context`` (full) or ``nan`` (the target gave no finite logit)."""
    n_ctx: int
    """Context the text was recorded in."""
    seconds: float
    """Wall-clock time of recording it."""
    tokens: Int32
    """[n] the prompt and the generated text, as far as it is known."""
    margin: Float32
    """[n - n_prompt] of each generated token: how far the target's choice was from another one, as
    ``Generation.margins``."""
    roots: Int32
    """[R] text positions of the recorded roots, ascending."""
    rank: UInt8
    """[R, D] forced path: rank 1..8 of ``tokens[t + 1 + d]`` among the head's candidates when the
    head was fed ``tokens[t..t + d]``; ``MISS``; ``UNKNOWN`` past the first miss, past the known
    text, or not recorded."""
    p: Float32
    """[R, D, 8] greedy path (the head fed its own best): full-vocabulary probability of the
    candidates, best first, rounded by :func:`quantise`. NaN: no candidate, or not kept: the file
    keeps ranks 4 to 8 only where the forced path goes too."""
    top10: Float32
    """[R, D] greedy path: full-vocabulary probability of the head's 10 best together. The file
    leaves it out: where the forced path goes too it is rank 1's ``p`` over ``p_min_p``."""
    p_min_p: Float32
    """[R, D] greedy path: the number the drafter compares with ``p_min``, ``Row.p_top10``."""
    off_index: Int32
    """[K] where the forced path is known and has left the greedy one: ``root_index * D + d``,
    ascending. Exactly those with a rank that is not 1 before them."""
    off_p: Float32
    """[K, 8] ``p`` there."""
    off_top10: Float32
    """[K] ``top10`` there."""
    overlap: Float32
    """[R, D] forced path: sum over tokens of min(p_target, p_head), NaN where unknown. It is the
    acceptance probability of a drafter that uses rejection sampling."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Anything else worth keeping, as JSON types."""

    def __post_init__(self) -> None:
        rank = np.asarray(self.rank)
        if rank.ndim != 2 or not 1 <= rank.shape[1] <= MAX_DEPTH:
            raise self._wrong(f"rank has shape {rank.shape}; it must be [roots, 1..{MAX_DEPTH}]")
        n_roots, depth = rank.shape
        n, k = len(self.tokens), len(self.off_index)
        for name, dtype, shape in (
            ("tokens", np.int32, (n,)),
            ("margin", np.float32, (n - self.n_prompt,)),
            ("roots", np.int32, (n_roots,)),
            ("rank", np.uint8, (n_roots, depth)),
            ("p", np.float32, (n_roots, depth, RANKS)),
            ("top10", np.float32, (n_roots, depth)),
            ("p_min_p", np.float32, (n_roots, depth)),
            ("off_index", np.int32, (k,)),
            ("off_p", np.float32, (k, RANKS)),
            ("off_top10", np.float32, (k,)),
            ("overlap", np.float32, (n_roots, depth)),
        ):
            array = np.ascontiguousarray(getattr(self, name), dtype)
            if array.size == 0:
                array = array.reshape(shape) if 0 in shape else array
            if array.shape != shape:
                raise self._wrong(f"{name} has shape {array.shape}, expected {shape}")
            object.__setattr__(self, name, array)
        self._check(n)

    def _check(self, n: int) -> None:
        if not 1 <= self.n_prompt <= n:
            raise self._wrong(f"n_prompt {self.n_prompt} does not fit {n} tokens")
        if self.stop not in STOPS:
            raise self._wrong(f"stop {printable(repr(self.stop))} is none of {', '.join(STOPS)}")
        if self.n_ctx < 0:
            raise self._wrong(f"n_ctx is {self.n_ctx}")
        if self.tokens.size and self.tokens.min() < 0:
            raise self._wrong("tokens holds a negative id")
        roots, rank = self.roots, self.rank
        if roots.size > MAX_ROOTS:
            raise self._wrong(f"{roots.size} roots are more than a text can have")
        if roots.size and not (
            self.n_prompt - 1 <= roots[0] and roots[-1] < n and (np.diff(roots) > 0).all()
        ):
            raise self._wrong("roots are not ascending positions of the generated text")
        known = rank != UNKNOWN
        hit = known & (rank != MISS)
        if (rank[known] > RANKS).any():
            raise self._wrong(f"rank holds a number above {RANKS}")
        if (known[:, 1:] & ~hit[:, :-1]).any():
            raise self._wrong("rank goes on after a miss or a gap")
        guessed = roots[:, None] + 1 + np.arange(self.depth)
        if (known & (guessed >= n)).any():
            raise self._wrong("rank goes on past the end of the text")
        if not np.array_equal(self.off_index, np.flatnonzero(known & _off_path(rank))):
            raise self._wrong("off_index is not where rank leaves the greedy path")

    def _wrong(self, what: str) -> InputError:
        return InputError(f"prompt {printable(str(self.id))}: {what}")

    @property
    def depth(self) -> int:
        """D."""
        return int(self.rank.shape[1])

    @property
    def n_generated(self) -> int:
        """Known tokens after the prompt."""
        return len(self.tokens) - self.n_prompt


def trace_header(
    *,
    depth: int,
    every: int = 1,
    n_predict: int = -1,
    heads: str = "single",
    n_blocks: int = 1,
    **rest: Any,
) -> dict[str, Any]:
    """Return a trace's header.

    Args:
        depth: D, 1..16. every: a root was recorded at every so many positions.
        n_predict: tokens that were asked for; the text holds as many more as its last
            verification may need. -1: to the end of generation or of the context.
        heads: ``single``, ``chain`` (a block per draft step: drafts are as long as there are
            blocks at most) or ``shared`` (the head reads the target's cells and cannot draft at
            position 0). n_blocks: NextN blocks.
        rest: ``sampling``, ``settings``, ``environment``, ``model``: all to reproduce it.
    """
    header = {
        "schema": SCHEMA,
        "arrays": list(ARRAYS),
        "depth": depth,
        "every": every,
        "n_predict": n_predict,
        "head": {"kind": heads, "blocks": n_blocks},
        **rest,
    }
    _check_header(header, "trace header")
    return header


def _check_header(header: dict[str, Any], where: str) -> None:
    def whole(value: object, low: int, high: int = 2**31 - 1) -> bool:
        return type(value) is int and low <= value <= high

    head = header.get("head")
    kind = head.get("kind") if isinstance(head, dict) else None
    for key, right in (
        ("arrays", header.get("arrays") == list(ARRAYS)),
        ("depth", whole(header.get("depth"), 1, MAX_DEPTH)),
        ("every", whole(header.get("every"), 1)),
        ("n_predict", whole(header.get("n_predict"), -1)),
        ("head", kind in ("single", "chain", "shared") and whole(head["blocks"], 0)),  # type: ignore[index]
    ):
        if not right:
            shown = printable(repr(header.get(key)))[:60]
            raise InputError(f"{where}: {key} is {shown}, which no trace has")


class Trace:
    """Recorded prompts and what they have in common. Nothing in it is to be changed.

    Args:
        header: see :func:`trace_header`.
        prompts: all of the header's depth.
        incomplete: what is missing at the end of the file it came from, None if nothing is.

    Raises:
        InputError: a header that is none, prompts of another depth or spacing.
    """

    def __init__(
        self,
        header: dict[str, Any],
        prompts: Iterable[TracedPrompt],
        *,
        incomplete: str | None = None,
    ) -> None:
        _check_header(header, "trace header")
        self.header = header
        self.prompts = list(prompts)
        self.incomplete = incomplete
        for prompt in self.prompts:
            if prompt.depth != self.depth:
                raise prompt._wrong(f"depth is {prompt.depth}, the header says {self.depth}")
            expected = np.arange(prompt.roots.size) * self.every + (prompt.n_prompt - 1)
            if not np.array_equal(prompt.roots, expected):
                raise prompt._wrong(f"roots are not every {self.every} positions from its end")

    def __repr__(self) -> str:
        return f"<Trace: {len(self.prompts)} prompts, {self.n_roots} roots, depth {self.depth}>"

    @property
    def depth(self) -> int:
        """D: draft positions recorded at each root."""
        return int(self.header["depth"])

    @property
    def every(self) -> int:
        """Text positions from one root to the next."""
        return int(self.header["every"])

    @property
    def n_predict(self) -> int:
        """Tokens that were asked for, -1 for no limit."""
        return int(self.header["n_predict"])

    @property
    def n_roots(self) -> int:
        """Roots of all prompts."""
        return sum(len(prompt.roots) for prompt in self.prompts)

    def select(self, which: Iterable[int | str]) -> Trace:
        """Return a trace of some prompts, by index or id, in that order; repeating is allowed.

        The prompts are shared. Raises InputError for one there is not.
        """
        by_id = {prompt.id: prompt for prompt in self.prompts}
        chosen = []
        for key in which:
            try:
                chosen.append(by_id[key] if isinstance(key, str) else self.prompts[key])
            except (KeyError, IndexError):
                raise InputError(f"the trace has no prompt {printable(str(key))}") from None
        return Trace(self.header, chosen, incomplete=self.incomplete)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file; a record cut off at its end is left out and named in ``incomplete``.

        Raises ``InputError``, naming the file and the place, for anything else that is not as
        :class:`TraceWriter` writes it.
        """
        where = printable(os.fspath(path))
        try:
            with open(path, "rb") as file:
                return TraceReader(file, where).trace()
        except OSError as error:
            raise InputError(f"{where}: cannot be read: {error.strerror or error}") from None


# ---- the file


class _Cut(Exception):
    """The file ends inside a record."""


class TraceReader:
    """Reads a trace file from its start; ``end`` is where its whole records end."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{where}: not a regular file; a trace cannot be read from a pipe")
        self.file, self.where, self.size = file, where, status.st_size
        self.end = 0

    def header(self) -> dict[str, Any]:
        line = self.file.readline(MAX_LINE)
        if not line:
            raise InputError(f"{self.where}: the file is empty")
        if _starts_like_a_header(line):
            raise InputError(f"{self.where}: cut off inside its header: nothing was recorded")
        try:
            header = json.loads(line)
        except (ValueError, RecursionError):
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
        _check_header(header, self.where)
        self.end = self.file.tell()
        return header

    def trace(self) -> Trace:
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

    def records(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield (line as a dict, the record's bytes) of every prompt after the header.

        The arrays are checked for damage, not for sense. Raises ``InputError`` also for a file
        that is cut off.
        """
        number = 0
        while self.end < self.size:
            number += 1
            place = f"{self.where}: prompt {number}"
            try:
                record, line, data = self._record(place)
            except _Cut:
                raise InputError(
                    f"{place} is cut off: go on with the recording first (--resume)"
                ) from None
            self.end = self.file.tell()
            yield record, line + data

    def _record(self, place: str) -> tuple[dict[str, Any], bytes, bytes]:
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
        return record, line, data

    def _prompt(self, header: dict[str, Any], place: str) -> TracedPrompt:
        record, _, data = self._record(place)
        try:
            return _unpacked(record, _read_arrays(data), header["depth"])
        except InputError as error:
            raise InputError(f"{place}: {error}") from None


def _starts_like_a_header(line: bytes) -> bool:
    """Whether the line is one of ours that lacks its end."""
    start = b'{"schema": "mtpstats.trace/'
    return not line.endswith(b"\n") and line.isascii() and start.startswith(line[: len(start)])


def _read_arrays(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of a record, which may promise what it does not hold."""
    file = io.BytesIO(data)
    arrays = {}
    for name, dtype, ndim in _ARRAYS:
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
    on = known & ~_off_path(prompt.rank)
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
    }
    file = io.BytesIO()
    for name, dtype, _ in _ARRAYS:
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
    record: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], depth: int
) -> TracedPrompt:
    for key, kinds in (
        ("id", (str,)),
        ("category", (str, type(None))),
        ("n_prompt", (int,)),
        ("stop", (str,)),
        ("n_ctx", (int,)),
        ("seconds", (int, float)),
        ("facts", (dict,)),
    ):
        if type(record.get(key)) not in kinds:
            raise InputError(f"{key} is {printable(repr(record.get(key)))[:40]}")
    rank = arrays["rank"]
    if rank.shape[1] != depth:
        raise InputError(f"rank has shape {rank.shape}, expected {(len(rank), depth)}")
    known = rank != UNKNOWN
    on = known & ~_off_path(rank)
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
    np.divide(p[:, :, 0], arrays["p_min_p"], out=top10, where=on & (arrays["p_min_p"] > 0))
    overlap = np.full(rank.shape, np.nan, np.float32)
    overlap[known] = arrays["path_overlap"]
    return TracedPrompt(
        id=record["id"],
        category=record["category"],
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
    )


def _exists(where: str) -> InputError:
    return InputError(
        f"{where}: exists already; go on with it (--resume), remove it, or name another file"
    )


def check_new(path: str | os.PathLike[str]) -> None:
    """Raise ``InputError`` now if a :class:`TraceWriter` would refuse to begin there later."""
    if os.path.lexists(path):
        raise _exists(printable(os.fspath(path)))


class TraceWriter:
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
        _check_header(header, "trace header")
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

        Raises ``InputError`` for a prompt of another depth, ``MtpStatsError`` when it cannot be
        written.
        """
        if prompt.depth != self.header["depth"]:
            raise InputError(
                f"prompt {printable(prompt.id)}: depth is {prompt.depth}, the header says "
                f"{self.header['depth']}"
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

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
