"""Traces of shards made one, record by record: what is in memory is a line for each prompt."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mtpstats import merge, reading
from mtpstats import result as results
from mtpstats.appending import seal
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.text import printable
from mtpstats.tracefile import SAME, TraceReader, check_new

BLOCK: Final = 1 << 24
START: Final = b'{"schema": "mtpstats.trace/'

# What results.check() takes: what is made one of a header, and of a prompt's line.
_SETTINGS: Final = results.RUN["settings"]
_HEADER: Final = {
    "environment?": results.RUN["environment"],
    "settings?": {"n_ctx?": (int, None)},
    "prompts?": {key: _SETTINGS[key] for key in ("shard?", "chat_prompts?")},
    "set_aside?": results.RUN["environment"]["set_aside?"],
}
_LINE: Final = {
    "id": str,
    "facts?": ({"prompt_sha256?": (str, None), "index?": (int, None)}, None),
}


@dataclass(frozen=True)
class MergedTrace:
    """What was written: the trace's header, its prompts and its bytes."""

    path: Path
    header: dict[str, Any]
    n_prompts: int
    size: int


@dataclass(frozen=True)
class _Record:
    """Where a prompt's record stands."""

    name: str
    text: str | None
    index: int | None
    shard: int
    begin: int
    end: int


def is_trace(path: Path) -> bool:
    """Whether a file begins like a trace; raises InputError where that cannot be looked at."""
    if path == reading.STDIN:
        return False
    try:
        with reading.open_regular(path) as file:
            return file.read(len(START)) == START
    except InputError:  # a pipe: results come from one, too
        return False
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{reading.shown(path)}: cannot be read: {reason}") from None


def merge_traces(paths: Sequence[Path], output: Path) -> MergedTrace:
    """Write one trace of several of one model and the same settings.

    Prompts are in the order of the whole run if all are of ``--shard``, else sorted by id. The
    costs are those of the first trace that has some. Every array is checked for damage on the way.

    Raises:
        InputError: fewer than two traces, one that is damaged or cut off, recordings that differ in
            a field that can change a number (the message names it), a prompt id that occurs twice,
            an ``output`` that exists.
        MtpStatsError: it cannot be written.
    """
    if len(paths) < 2:
        raise InputError("merging needs at least two traces")
    check_new(output, resumable=False)
    with ExitStack() as stack:
        files, headers = [], []
        records: dict[str, _Record] = {}
        for number, path in enumerate(paths):
            where = printable(str(path))
            try:
                file = stack.enter_context(reading.open_regular(path))
            except (OSError, ValueError) as error:  # ValueError: a NUL in the name
                reason = getattr(error, "strerror", None) or error
                raise InputError(f"{where}: cannot be read: {reason}") from None
            reader = TraceReader(file, where)
            headers.append(reader.header())
            results.check(headers[-1], _HEADER, where, "")
            _refuse_unlike(paths[0], headers[0], path, headers[-1])
            begin = reader.end
            for line in reader.records():
                results.check(line, _LINE, f"{where}, byte {begin}", "")
                facts = line.get("facts") or {}
                record = _Record(
                    line["id"], facts.get("prompt_sha256"), facts.get("index"),
                    number, begin, reader.end,
                )  # fmt: skip
                if record.name in records:
                    _refuse_twice(paths, records[record.name], record)
                records[record.name] = record
                begin = reader.end
            files.append(file)
        counts = [0] * len(paths)
        for record in records.values():
            counts[record.shard] += 1
        header = _header(headers, counts)
        ordered = sorted(records.values(), key=lambda one: merge.place(one.name, one.index))
        size = _write(output, header, [(files[r.shard], r.begin, r.end) for r in ordered])
    return MergedTrace(output, header, len(ordered), size)


def _write(output: Path, header: dict[str, Any], parts: Sequence[tuple[Any, int, int]]) -> int:
    """Write a trace under a temporary name and rename it; return its size."""
    where = printable(str(output))
    try:
        handle, name = tempfile.mkstemp(prefix=f".{output.name[:80]}.", dir=output.parent)
        try:
            with open(handle, "wb") as file:
                file.write(seal(header))
                for source, begin, end in parts:
                    source.seek(begin)
                    file.write(source.read(end - begin))
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, output)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise MtpStatsError(f"{where}: not written: {error.strerror or error}") from None
    return size


def rewrite_header(path: Path, header: dict[str, Any]) -> None:
    """Give a trace another header; its prompts are copied as they stand."""
    with open(path, "rb") as file:
        reader = TraceReader(file, printable(str(path)))
        reader.header()
        begin, end = reader.end, reader.size
        parts = [(file, at, min(at + BLOCK, end)) for at in range(begin, end, BLOCK)]
        _write(path, header, parts)


def _refuse_unlike(
    first_path: Path, first: dict[str, Any], path: Path, other: dict[str, Any]
) -> None:
    unlike = merge.difference(_as_run(first), _as_run(other))
    if unlike is not None:
        field, here, there = unlike
        raise InputError(
            f"{printable(str(first_path))} and {printable(str(path))} are not of one recording: "
            f"{field} is {here} in the first and {there} in the second"
        )


def _as_run(header: dict[str, Any]) -> dict[str, Any]:
    """Return a trace's header in the form of a result, so that the same rules hold for both."""
    own = {key: header.get(key) for key in SAME if key not in ("sampling", "settings", "schema")}
    return {
        "model": header.get("model") or {},
        "environment": {"devices": [], **(header.get("environment") or {})},
        "settings": {
            **own,
            **(header.get("sampling") or {}),
            **(header.get("settings") or {}),
            **(header.get("prompts") or {}),
        },
    }


def _refuse_twice(paths: Sequence[Path], before: _Record, record: _Record) -> None:
    same = record.text is not None and before.text == record.text
    problem = "it would count twice" if same else "with another text: give each an id of its own"
    raise InputError(
        f"prompt {printable(record.name)} is in {printable(str(paths[before.shard]))} and in "
        f"{printable(str(paths[record.shard]))}, {problem}"
    )


def _header(headers: Sequence[dict[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """Return the header of the whole."""
    first = headers[0]
    merged = dict(first)
    costs = [header["cost"] for header in headers if header.get("cost")]
    if costs:
        merged["cost"] = costs[0]
    if any("set_aside" in header for header in headers):
        merged["set_aside"] = [one for h in headers for one in h.get("set_aside", ())]
    pairs = list(zip(headers, counts, strict=True))
    prompts = merge.merged_settings([{"n_prompts": n, **h.get("prompts", {})} for h, n in pairs])
    merged["prompts"] = {k: v for k, v in prompts.items() if k not in ("n_prompts", "n_ctx")}
    contexts = [(header.get("settings") or {}).get("n_ctx") for header in headers]
    if isinstance(first.get("settings"), dict):
        known = [n_ctx for n_ctx in contexts if n_ctx is not None]
        merged["settings"] = {**first["settings"], "n_ctx": max(known, default=None)}
    if all(isinstance(header.get("environment"), dict) for header in headers):
        merged["environment"] = merge.merged_environment(
            [{"environment": header["environment"], "prompts": [None] * n} for header, n in pairs]
        )
    return merged


def kind_of(paths: Sequence[Path]) -> str:
    """Return ``trace`` or ``result``, what all files are; InputError if they are not alike."""
    kinds = {is_trace(path) for path in paths}
    if len(kinds) > 1:
        trace = next(path for path in paths if is_trace(path))
        raise InputError(
            f"{results.described(str(trace))} is a trace and others are not: merge results with "
            "results and traces with traces"
        )
    return "trace" if kinds == {True} else "result"
