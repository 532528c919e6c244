"""The forms a file of many prompts may have: a prompt per line, JSON Lines, JSON, CSV."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mtpstats import conversation, reading
from mtpstats.conversation import Conversation
from mtpstats.errors import InputError
from mtpstats.reading import MAX_BYTES
from mtpstats.text import printable

MAX_PROMPTS = 200_000
"""In one file: more would run for days, and take the memory that the model needs."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue. ``category`` is None where nobody gave one.

    A ``conversation`` has no text yet: the model's chat template makes it. ``index`` is the place
    in the whole run of a prompt that a shard runs.
    """

    id: str
    category: str | None
    text: str
    conversation: Conversation | None = None
    index: int | None = None

    @property
    def sha256(self) -> str:
        """Hash of the text as UTF-8, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Fields:
    """Under which keys or columns entries hold their prompt and category; None: the usual ones."""

    prompt: str | None = None
    category: str | None = None


Reader = Callable[[str, str, str, Fields], list[Prompt]]
"""(text, name for ids, place for errors, fields) -> prompts."""


def of(suffix: str) -> Reader | None:
    """Return what reads files with this ending, None if nothing does."""
    return _BY_SUFFIX.get(suffix.lower())


def guessed(text: str) -> Reader:
    """Return what reads a text without a name: by how it begins, as JSON does or does not."""
    start = text.lstrip()
    if start.startswith("{"):
        return _jsonl
    if start.startswith("[") and start[1:].lstrip()[:1] in ("{", '"'):
        return _json
    return _txt


def usable(text: str, where: str) -> str:
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


def _txt(text: str, name: str, where: str, _fields: Fields) -> list[Prompt]:
    return [
        Prompt(f"{name}:{number}", None, usable(line, f"{where}:{number}"))
        for number, line in _lines(text, where)
    ]


def _jsonl(text: str, name: str, where: str, fields: Fields) -> list[Prompt]:
    return _from_entries(
        (
            (f"{name}:{number}", f"{where}:{number}", _parsed(line, f"{where}:{number}"))
            for number, line in _lines(text, where)
        ),
        fields,
    )


def _json(text: str, name: str, where: str, fields: Fields) -> list[Prompt]:
    data = _parsed(text, where)
    if not isinstance(data, list):
        raise InputError(f"{where}: expected a list of prompts, found {_kind(data)}")
    _check_count(len(data), where)
    return _from_entries(
        (
            (f"{name}:{number}", f"{where}: entry {number}", entry)
            for number, entry in enumerate(data, 1)
        ),
        fields,
    )


def _csv(text: str, name: str, where: str, fields: Fields) -> list[Prompt]:
    return _table(text, name, where, fields, ",")


def _tsv(text: str, name: str, where: str, fields: Fields) -> list[Prompt]:
    return _table(text, name, where, fields, "\t")


def _table(text: str, name: str, where: str, fields: Fields, delimiter: str) -> list[Prompt]:
    """Read rows under a header; they become the entries that JSON would have."""
    header_end = text.find("\n")
    header = text if header_end < 0 else text[:header_end]
    if delimiter not in header and ";" in header:
        delimiter = ";"  # what spreadsheets write where the comma is for decimals
    rows = _rows(text, where, delimiter)
    _, columns = next(rows, (1, []))
    if len(set(columns)) < len(columns):
        raise InputError(f"{where}: two columns have the same name")
    column = fields.prompt or (columns[0] if len(columns) == 1 else "prompt")
    if column not in columns:
        raise InputError(
            f'{where}: needs a column "{printable(column)}", or another named by --prompt-field; '
            f"it has: {_few(columns)}"
        )

    def entries() -> Iterator[tuple[str, str, Any]]:
        for number, row in rows:
            place = f"{where}:{number}"
            if len(row) != len(columns):
                raise InputError(f"{place}: {len(row)} cells under {len(columns)} columns")
            entry = dict(zip(columns, row, strict=True))
            kept: dict[str, Any] = {
                key: entry[key] or None for key in ("id", "category") if key in entry
            }
            if fields.category is not None and fields.category in entry:
                kept[fields.category] = entry[fields.category]
            yield f"{name}:{number}", place, {**kept, column: entry[column]}

    return _from_entries(entries(), Fields(column, fields.category))


def _rows(text: str, where: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (1-based number of its first line, cells) of every row that is not blank."""
    old_limit = csv.field_size_limit(MAX_BYTES)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        count, line = 0, 1
        for row in reader:
            if row:
                _check_count(count, where)
                count += 1
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{where}:{line}: not valid CSV: {error}") from None
    finally:
        csv.field_size_limit(old_limit)


_BY_SUFFIX: dict[str, Reader] = {
    ".txt": _txt,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
}


def _lines(text: str, where: str) -> list[tuple[int, str]]:
    """Return (1-based number, line) of every line with something on it; CRLF and LF end lines."""
    _check_count(text.count("\n"), where)
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _check_count(count: int, where: str) -> None:
    if count > MAX_PROMPTS:
        raise InputError(f"{where}: more than {MAX_PROMPTS:,} prompts; take a part of them")


def _parsed(text: str, where: str) -> Any:
    try:
        return reading.loads(text, nan=True)
    except json.JSONDecodeError as error:
        place = f" (line {error.lineno})" if error.lineno > 1 else ""
        raise InputError(f"{where}: not valid JSON: {error.msg}{place}") from None
    except ValueError as error:
        raise InputError(f"{where}: not usable JSON: {error}") from None


def _from_entries(entries: Iterable[tuple[str, str, Any]], fields: Fields) -> list[Prompt]:
    """Turn (id to use when none is given, place for errors, JSON value) into prompts."""
    prompts = []
    given: dict[str, str] = {}
    for name, where, entry in entries:
        if isinstance(entry, str):
            prompts.append(Prompt(name, None, usable(entry, where)))
            continue
        if not isinstance(entry, dict):
            raise InputError(f"{where}: expected a string or an object, found {_kind(entry)}")
        text, talk = _content(entry, where, fields.prompt)
        if entry.get("id") is not None:
            name = _label(entry["id"], "id", where)
            if name in given:
                raise InputError(f"{where}: the id {printable(name)} was used at {given[name]}")
            given[name] = where
        prompts.append(Prompt(name, _category(entry, where, fields.category), text, talk))
    return prompts


def _content(
    entry: dict[str, Any], where: str, field: str | None
) -> tuple[str, Conversation | None]:
    """Return the text of an entry, or no text and its conversation."""
    if field is None:
        if "messages" in entry:
            return "", conversation.from_openai(entry, entry["messages"], where)
        if "conversations" in entry:
            return "", conversation.from_sharegpt(entry, where)
    value = entry.get(field or "prompt")
    if isinstance(value, list):
        return "", conversation.from_openai(entry, value, where)
    if isinstance(value, str):
        return usable(value, where), None
    wanted = '"messages", "conversations" or "prompt"' if field is None else f'"{printable(field)}"'
    raise InputError(f"{where}: needs {wanted} with a text or messages; it has: {_few(entry)}")


def _category(entry: dict[str, Any], where: str, field: str | None) -> str | None:
    value = entry.get(field or "category")
    if value is not None:
        return _label(value, field or "category", where)
    if field is None:
        return None
    raise InputError(f'{where}: has no "{printable(field)}" (--category-field)')


def _few(names: Iterable[str]) -> str:
    return ", ".join(printable(name) for name in list(names)[:5]) or "nothing"


def _label(value: Any, key: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise InputError(
            f'{where}: "{printable(key)}" must be a string or an integer, not {_kind(value)}'
        )
    return usable(str(value), f"{where}: {printable(key)}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
