"""Prompts: the built-in ones, and those that users bring as text or files.

Files are read as UTF-8 with or without a byte order mark. Whatever is wrong with one is an
:class:`~mtpstats.errors.InputError` that names the file and, where there is one, the line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from mtpstats import conversation, forms, reading
from mtpstats.errors import InputError
from mtpstats.forms import Fields, Prompt, usable
from mtpstats.text import printable

__all__ = [
    "Fields",
    "Prompt",
    "Sources",
    "builtin",
    "from_file",
    "from_text",
    "gather",
    "load",
    "shuffled",
    "suite",
    "unescape",
    "with_unique_ids",
]

_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))")
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


@dataclass(frozen=True)
class Sources:
    """Where prompts come from; all of it adds up in this order."""

    texts: Sequence[str] = ()
    files: Sequence[Path] = ()
    many: Sequence[Path] = ()
    suite: bool = False
    escape: bool = True
    fields: Fields = field(default_factory=Fields)


def gather(sources: Sources) -> list[Prompt]:
    """Return the prompts of all sources with unique ids, the built-in ones if there are none.

    Of several files of many prompts, each is the category of its prompts that name none.
    """
    found = [
        from_text(text, f"prompt-{number}", escape=sources.escape)
        for number, text in enumerate(sources.texts, 1)
    ]
    for path in sources.files:
        found += from_files(path, escape=sources.escape)
    loaded = [(path, load(path, sources.fields)) for path in sources.many]
    for path, prompts in loaded:
        name = _stem(path) if len(loaded) > 1 and path != reading.STDIN else None
        found += _in_category(name, prompts)
    if sources.suite:
        found += suite()
    return with_unique_ids(found or builtin())


def builtin() -> list[Prompt]:
    """Return the prompts that ship with mtpstats: Python code, documentation and prose."""
    return [Prompt(**entry) for entry in _shipped("prompts.json")]


def suite() -> list[Prompt]:
    """Return the conversations that ship with mtpstats, for models that follow instructions."""
    return [
        Prompt(
            entry["id"],
            entry["category"],
            "",
            conversation.from_openai(entry, entry["messages"], entry["id"]),
        )
        for entry in _shipped("suite.json")
    ]


def _shipped(name: str) -> list[dict[str, Any]]:
    source = files("mtpstats").joinpath(f"data/{name}")
    return json.loads(source.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def from_text(text: str, name: str, *, escape: bool = True) -> Prompt:
    r"""Return the prompt of one command line argument.

    ``escape`` turns ``\n`` and its kind into what they stand for, as llama.cpp does by default.
    """
    if any("\udc80" <= char <= "\udcff" for char in text):
        # How Python shows bytes that the locale's encoding could not read.
        text = reading.decoded(os.fsencode(text), name)
    return Prompt(name, None, usable(unescape(text, name) if escape else text, name))


def from_file(path: Path, *, escape: bool = True) -> Prompt:
    """Return a whole file as one prompt; one line end at its end goes, as in llama.cpp."""
    name = _name(path)
    text = re.sub(r"\r?\n\Z", "", reading.read(path))
    return Prompt(name, None, usable(unescape(text, name) if escape else text, reading.shown(path)))


def from_files(path: Path, *, escape: bool = True) -> list[Prompt]:
    """Return a file as one prompt, or each file of a directory as one.

    Below a directory, a file's category is the subdirectory it lies in, else its own name without
    ending and number: ``code-01.txt`` is ``code``.
    """
    if not reading.is_directory(path):
        return [from_file(path, escape=escape)]
    found = [
        replace(from_file(file, escape=escape), category=_category(file, path))
        for file in reading.files_below(path)
    ]
    if not found:
        raise InputError(f"{reading.shown(path)}: no file in it")
    return found


def load(path: Path, fields: Fields | None = None) -> list[Prompt]:
    r"""Return the prompts of a file, a directory of such files or, for ``-``, standard input.

    Files are told apart by their ending. ``.txt``: one prompt per line, blank lines left out.
    ``.jsonl``: one JSON string or object per line. ``.json``: a list of them. ``.csv``, ``.tsv``:
    rows under a header. Standard input and pipes, which have no ending, are read as JSON if they
    begin like it, else as lines.

    An object has ``messages`` in OpenAI's form (and may have ``tools``), ShareGPT's
    ``conversations``, or ``prompt``; a row has ``prompt`` or is a single cell. Both may have ``id``
    and ``category``. Ids given twice in one file are refused, missing ones come from file and line.
    """
    if reading.is_directory(path):
        return _load_directory(path, fields or Fields())
    reader = forms.of(path.suffix)
    if reader is None and path.is_file():
        raise InputError(
            f"{reading.shown(path)}: --prompts reads .txt, .jsonl, .json, .csv and .tsv files, "
            "told apart by their ending; a file that is one prompt goes to -f"
        )
    text = reading.read(path)
    reader = reader or forms.guessed(text)
    prompts = reader(text, _name(path), reading.shown(path), fields or Fields())
    if not prompts:
        raise InputError(f"{reading.shown(path)}: no prompt in it")
    return prompts


def _load_directory(path: Path, fields: Fields) -> list[Prompt]:
    found: list[Prompt] = []
    for file in reading.files_below(path, lambda file: forms.of(file.suffix)):
        found += _in_category(_category(file, path), load(file, fields))
    if not found:
        raise InputError(
            f"{reading.shown(path)}: no .txt, .jsonl, .json, .csv or .tsv file in it; a directory "
            "whose files are one prompt each goes to -f"
        )
    return found


def _name(path: Path) -> str:
    return "stdin" if path == reading.STDIN else printable(path.name)


def _stem(path: Path) -> str:
    stem = printable(path.stem)
    return re.sub(r"[-_. ]?\d+\Z", "", stem) or stem


def _category(file: Path, directory: Path) -> str:
    inner = file.relative_to(directory).parts
    return printable(inner[0]) if len(inner) > 1 else _stem(file)


def _in_category(name: str | None, prompts: Iterable[Prompt]) -> list[Prompt]:
    return [replace(p, category=name) if p.category is None else p for p in prompts]


def shuffled(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """Return the prompts in an order that depends on the seed and their ids alone.

    So it is the same on every machine and Python, and a prompt more does not reorder the others.
    """

    def key(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{seed}:{prompt.id}".encode()).digest()

    return sorted(prompts, key=key)


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

    return reading.decoded(_ESCAPE.sub(plain, text.encode("utf-8", "surrogatepass")), name)
