"""Prompts: the built-in ones, and those that users bring as text or files.

Files are read as UTF-8 with or without a byte order mark. Whatever is wrong with one is an
:class:`~mtpstats.errors.InputError` that names the file and, where there is one, the line.
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from mtpstats.errors import InputError
from mtpstats.text import printable

MAX_BYTES = 64 << 20
"""A prompt file larger than this is a mistake: no context holds it."""

PIPE_PATIENCE_S = 5.0

_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))")
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


@dataclass(frozen=True)
class Prompt:
    """A text to continue. ``category`` is None where nobody gave one."""

    id: str
    category: str | None
    text: str


def builtin() -> list[Prompt]:
    """Return the prompts that ship with mtpstats: Python code, documentation and prose."""
    source = files("mtpstats").joinpath("data/prompts.json")
    return [Prompt(**entry) for entry in json.loads(source.read_text(encoding="utf-8"))]


def from_text(text: str, name: str, *, escape: bool = True) -> Prompt:
    r"""Return the prompt of one command line argument.

    ``escape`` turns ``\n`` and its kind into what they stand for, as llama.cpp does by default.
    """
    if any("\udc80" <= char <= "\udcff" for char in text):
        # How Python shows bytes that the locale's encoding could not read.
        text = _decoded(os.fsencode(text), name)
    return Prompt(name, None, _usable(unescape(text, name) if escape else text, name))


def from_file(path: Path, *, escape: bool = True) -> Prompt:
    """Return a whole file as one prompt; one line end at its end goes, as in llama.cpp."""
    name = printable(path.name)
    text = re.sub(r"\r?\n\Z", "", _decoded(_read(path), _shown(path)))
    return Prompt(name, None, _usable(unescape(text, name) if escape else text, _shown(path)))


def load(path: Path) -> list[Prompt]:
    r"""Return the prompts of a file, read by its ending.

    ``.txt``: one per line, blank lines left out. ``.jsonl``: one JSON string or object per line.
    ``.json``: a list of them. An object has ``prompt`` (a string) and may have ``id`` and
    ``category``; ids given twice in one file are refused, missing ones come from file and line.
    """
    readers = {".txt": _txt, ".jsonl": _jsonl, ".json": _json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"{_shown(path)}: --prompts reads .txt, .jsonl and .json files, told apart by their "
            "ending; a file that is one prompt goes to -f"
        )
    prompts = reader(path, _decoded(_read(path), _shown(path)))
    if not prompts:
        raise InputError(f"{_shown(path)}: no prompt in it")
    return prompts


def with_unique_ids(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts with ids made unique: the second ``a`` becomes ``a~2``."""
    seen: dict[str, int] = {}
    taken: set[str] = set()
    unique = []
    for prompt in prompts:
        name = prompt.id
        while name in taken:
            seen[prompt.id] = seen.get(prompt.id, 1) + 1
            name = f"{prompt.id}~{seen[prompt.id]}"
        taken.add(name)
        unique.append(prompt if name == prompt.id else replace(prompt, id=name))
    return unique


def unescape(text: str, name: str) -> str:
    r"""Replace ``\n \r \t \' \" \\ \xHH`` by what they stand for; anything else stays.

    >>> unescape(r"a\tb\x41\q", "example")
    'a\tbA\\q'
    """

    def plain(match: re.Match[bytes]) -> bytes:
        if match[1] is not None:
            return bytes([int(match[1], 16)])
        return _ESCAPED.get(match[2], match[2])

    return _decoded(_ESCAPE.sub(plain, text.encode("utf-8", "surrogatepass")), name)


def _txt(path: Path, text: str) -> list[Prompt]:
    return [
        Prompt(f"{printable(path.name)}:{number}", None, _usable(line, f"{_shown(path)}:{number}"))
        for number, line in _lines(text)
    ]


def _jsonl(path: Path, text: str) -> list[Prompt]:
    entries = []
    for number, line in _lines(text):
        where = f"{_shown(path)}:{number}"
        entries.append((f"{printable(path.name)}:{number}", where, _parsed(line, where)))
    return _from_entries(entries)


def _json(path: Path, text: str) -> list[Prompt]:
    data = _parsed(text, _shown(path))
    if not isinstance(data, list):
        raise InputError(f"{_shown(path)}: expected a list of prompts, found {_kind(data)}")
    return _from_entries(
        (f"{printable(path.name)}:{number}", f"{_shown(path)}: entry {number}", entry)
        for number, entry in enumerate(data, 1)
    )


def _lines(text: str) -> list[tuple[int, str]]:
    """Return (1-based number, line) of every line with something on it; CRLF and LF end lines."""
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f" (line {error.lineno})" if error.lineno > 1 else ""
        raise InputError(f"{where}: not valid JSON: {error.msg}{place}") from None
    except (ValueError, RecursionError):
        raise InputError(
            f"{where}: not usable JSON: nested too deep, or a number too long"
        ) from None


def _from_entries(entries: Iterable[tuple[str, str, Any]]) -> list[Prompt]:
    """Turn (id to use when none is given, place for errors, JSON value) into prompts."""
    prompts = []
    given: dict[str, str] = {}
    for name, where, entry in entries:
        if isinstance(entry, str):
            prompts.append(Prompt(name, None, _usable(entry, where)))
            continue
        if not isinstance(entry, dict):
            raise InputError(f"{where}: expected a string or an object, found {_kind(entry)}")
        if not isinstance(entry.get("prompt"), str):
            found = ", ".join(printable(key) for key in list(entry)[:5]) or "nothing"
            raise InputError(f'{where}: needs "prompt" with a string; it has: {found}')
        if entry.get("id") is not None:
            name = _label(entry["id"], "id", where)
            if name in given:
                raise InputError(f"{where}: the id {printable(name)} was used at {given[name]}")
            given[name] = where
        category = entry.get("category")
        if category is not None:
            category = _label(category, "category", where)
        prompts.append(Prompt(name, category, _usable(entry["prompt"], where)))
    return prompts


def _label(value: Any, key: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise InputError(f'{where}: "{key}" must be a string or an integer, not {_kind(value)}')
    return _usable(str(value), f"{where}: {key}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def _usable(text: str, where: str) -> str:
    """Return the text if it can go to a tokenizer."""
    if not text:
        raise InputError(f"{where}: the prompt is empty")
    if "\0" in text:
        raise InputError(f"{where}: holds a NUL character; prompts are text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: holds half of a surrogate pair, which is no text") from None
    return text


def _decoded(data: bytes, where: str) -> str:
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
        # Non-blocking, because opening a pipe that nobody writes to would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _read_fd(fd, path)
        finally:
            os.close(fd)
    except OSError as error:
        raise InputError(f"{_shown(path)}: cannot be read: {error.strerror or error}") from None


def _read_fd(fd: int, path: Path) -> bytes:
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        raise InputError(f"{_shown(path)}: is a directory, not a file of prompts")
    data = bytearray()
    if stat.S_ISFIFO(found.st_mode):
        data += _await_writer(fd, path)
    size = found.st_size
    os.set_blocking(fd, True)
    while size <= MAX_BYTES:
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            return bytes(data)
        data += chunk
        size = len(data)
    raise InputError(
        f"{_shown(path)}: larger than {MAX_BYTES >> 20} MiB, more than any context holds"
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
        raise InputError(f"{_shown(path)}: a pipe that nothing writes to")
    return first


def _shown(path: Path) -> str:
    return printable(str(path))
