"""Files that are only appended to: whole records, on the disk with their names."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mtpstats.appending import AppendFile, Removed, seal, unsealed


@pytest.fixture
def appended(tmp_path: Path) -> Iterator[tuple[AppendFile, Path]]:
    path = tmp_path / "x"
    with AppendFile(path, new=True) as file:
        file.append(b"one")
        yield file, path


def test_a_large_file_is_put_back_whole(appended: tuple[AppendFile, Path]) -> None:
    file, path = appended
    file.append(b"2" * (3 << 20))
    path.unlink()
    file.append(b"four")
    assert path.read_bytes() == b"one" + b"2" * (3 << 20) + b"four"


def test_the_name_reaches_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []

    def number(path: Path) -> int:
        return path.stat().st_ino

    path = tmp_path / "x"
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    with AppendFile(path, new=True) as file:
        assert synced == [number(tmp_path)]
        file.append(b"one")
        assert synced == [number(tmp_path), number(path)]
        path.unlink()
        file.append(b"two")
        assert synced[-2:] == [number(path), number(tmp_path)]


def test_another_file_in_its_place_is_not_touched(appended: tuple[AppendFile, Path]) -> None:
    file, path = appended
    path.unlink()
    path.write_bytes(b"mine")
    with pytest.raises(Removed, match="cannot be put back: File exists"):
        file.append(b"two")
    assert (path.read_bytes(), file.end) == (b"mine", 0)


def test_a_disk_too_full_to_put_it_back_leaves_no_half(
    appended: tuple[AppendFile, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, path = appended
    path.unlink()
    synced: list[int] = []

    def full(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Removed, match="cannot be put back: No space left on device"):
        file.append(b"two")
    assert not path.exists()


def test_a_seal_covers_all_of_its_line() -> None:
    line = seal({"a": [1, None, "\u00e9\n"], "b": 0.1})
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert unsealed(line) == {"a": [1, None, "\u00e9\n"], "b": 0.1}
    body = b'{"a": x'
    assert unsealed(body + b', "check": %d}\n' % zlib.crc32(body)) is None
    for at in range(len(line)):
        damaged = bytearray(line)
        damaged[at] ^= 4
        with suppress(ValueError):
            assert unsealed(bytes(damaged)) is None
