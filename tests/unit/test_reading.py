"""Files of any origin: how much of them is read, which of a directory, and what stays open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtpstats import reading
from mtpstats.errors import InputError


def test_the_limit_itself_is_not_too_much(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert reading.read(path, 5) == "12345"
    with pytest.raises(InputError, match="x: larger than 4 bytes"):
        reading.read(path, 4)


def test_what_comes_while_a_pipe_is_waited_for_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)

    def nothing(*_: object) -> tuple[list[int], list[int], list[int]]:
        os.write(writer, b"abc")  # just when patience is over
        return [], [], []

    monkeypatch.setattr(reading.select, "select", nothing)
    chunks = reading.chunks(path)
    found = next(chunks)
    os.close(writer)
    assert found + b"".join(chunks) == b"abc"


def test_nothing_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1")
    lowest = os.open(path, os.O_RDONLY)
    os.close(lowest)
    reading.read(path)
    with pytest.raises(InputError, match="is a directory"):
        reading.read(tmp_path)
    with pytest.raises(InputError, match="not a regular file"):
        reading.open_regular("/dev/null")
    again = os.open(path, os.O_RDONLY)
    os.close(again)
    assert again == lowest


def test_files_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["b.txt", "a/z.txt", "a/y.txt", ".git/c.txt", "a/.hidden", "c.md", ".d/e/f.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "link.txt").symlink_to("b.txt")
    (tmp_path / "nowhere.txt").symlink_to("none")
    walk = os.walk

    def backwards(*args: object, **options: object) -> object:
        for place, inner, files in walk(*args, **options):  # type: ignore[call-overload]
            yield place, inner, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    found = reading.files_below(tmp_path, lambda path: path.suffix == ".txt")
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "a/y.txt", "a/z.txt", "b.txt", "link.txt"
    ]  # fmt: skip
    with pytest.raises(InputError, match="none: cannot be read: No such file"):
        reading.files_below(tmp_path / "none")
