"""The header reader: what it reads, and that no mutation gets past it with another exception."""

from __future__ import annotations

import ctypes
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf as reference
import pytest

from mtpstats.errors import ModelError
from mtpstats.llama import Library, gguf


@pytest.fixture(scope="module")
def small(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen35")


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return (
        string(name)
        + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, offset)
    )


def header(keys: list[bytes], tensors: list[bytes], *, version: int = 3, data: int = 0) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    body = head + b"".join(keys) + b"".join(tensors)
    return body + bytes(-len(body) % 32 + data)


ARCH = key(b"general.architecture", 8, string(b"llama"))


def test_it_reads_what_the_reference_reader_reads(small: Path) -> None:
    ours, theirs = gguf.read(small), reference.GGUFReader(small)
    assert ours.version == 3
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for one in theirs.tensors:
        mine = ours.tensors[one.name]
        assert (mine.shape, mine.kind) == (tuple(one.shape), one.tensor_type)
        assert (mine.offset, mine.size) == (one.data_offset, one.n_bytes)
    for name, field in theirs.fields.items():
        if name.startswith("GGUF."):
            continue
        value = ours.metadata[name]
        if isinstance(value, gguf.Array):
            assert value.count == len(field.contents())
        else:
            assert value == field.contents()


def test_type_sizes_are_ggmls_own(lib: Library) -> None:
    block, size = lib._cdll["ggml_blck_size"], lib._cdll["ggml_type_size"]
    block.restype, size.restype = ctypes.c_int64, ctypes.c_size_t
    for kind, expected in gguf.TYPE_SIZES.items():
        assert (block(kind), size(kind)) == expected, kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"GG", "not a GGUF file"),
        (b"version https://git-lfs", "not a GGUF file"),
        (b"GGUF", "truncated"),
        (b"GGUF\0\0\0\3" + bytes(16), "other byte order"),
        (header([ARCH], [], version=1), "version 1"),
        (header([ARCH], [], version=4), "version 4"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "tensors does not fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "keys and 0 tensors does not fit"),
        (header([ARCH, ARCH], []), "occurs twice"),
        (header([key(b"", 4, bytes(4))], []), "key is empty"),
        (header([key(b"a", 13, bytes(4))], []), "'a' has unknown type 13"),
        (header([key(b"a", 9, struct.pack("<IQ", 9, 1))], []), "array of unknown type 9"),
        (header([key(b"a", 9, struct.pack("<IQ", 4, 2**62))], []), "'a' does not fit"),
        (header([key(b"a", 9, struct.pack("<IQ", 8, 2**62))], []), "'a' does not fit"),
        (header([key(b"a", 9, struct.pack("<IQQ", 8, 1, 2**63))], []), "'a' does not fit"),
        (header([key(b"a", 8, struct.pack("<Q", 2**64 - 1))], []), "'a' does not fit"),
        (header([key(b"\x1b[2J", 99, b"")], []), r"'\\x1b\[2J' has unknown type"),
        (header([key(b"general.alignment", 10, bytes(8))], []), "not a uint32"),
        (header([key(b"split.no", 4, bytes(4))], []), "'split.no' is not a uint16"),
        (header([key(b"general.alignment", 4, struct.pack("<I", 24))], []), "power of two"),
        (header([key(b"general.alignment", 4, bytes(4))], []), "power of two"),
        (header([], [tensor(b"t", (4,), 0, 0)]), "truncated: tensor 't' ends at byte"),
        (header([], [tensor(b"t", (4,), 0, 32)], data=64), "offset 32, expected 0"),
        (header([], [tensor(b"t", (4,), 0, 0)] * 2, data=64), "'t' occurs twice"),
        (
            header(
                [key(b"general.alignment", 4, struct.pack("<I", 4))],
                [tensor(b"t", (1,), 0, 0)],
                data=64,
            ),
            "'t' does not lie at a multiple of 32",
        ),
        (
            header(
                [key(b"tokenizer.ggml.tokens", 9, struct.pack("<IQQ", 8, 1, 70000))],
                [],
                data=80000,
            ),
            "a token of 70000 bytes",
        ),
        (header([], [tensor(b"t", (0,), 0, 0)], data=64), "impossible shape"),
        (header([], [tensor(b"t", (2**32, 2**32), 0, 0)], data=64), "impossible shape"),
        (header([], [tensor(b"t", (1,) * 5, 0, 0)], data=64), "5 dimensions"),
        (header([], [tensor(b"t", (33,), 8, 0)], data=64), "not a multiple of 32"),
        (header([], [tensor(b"t", (32,), 4, 0)], data=64), "unknown type 4"),
        (header([], [tensor(b"t" * 64, (4,), 0, 0)], data=64), "64 bytes long"),
    ],
)
def test_each_defect_has_its_own_message(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as raised:
        gguf.read(path)
    assert "\n" not in str(raised.value)
    assert "\x1b" not in str(raised.value)


def test_a_sound_hand_made_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(header([ARCH], [tensor(b"t", (4, 2), 0, 0)], version=2, data=32))
    read = gguf.read(path)
    assert read.tensors["t"] == gguf.Tensor("t", (4, 2), 0, len(path.read_bytes()) - 32, 32)


def test_not_a_regular_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        gguf.read(tmp_path / "missing.gguf")
    with pytest.raises(ModelError):
        gguf.read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(ModelError, match="not a regular file"):
            gguf.read(path)


def test_every_truncation_of_the_header_is_refused(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    first = min(t.offset for t in gguf.read(small).tensors.values())
    path = tmp_path / "cut.gguf"
    for length in [*range(1, 400), *range(400, first, 97), first, first + 1, len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            gguf.read(path)


def test_mutations_raise_model_error_or_nothing(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    first = min(t.offset for t in gguf.read(small).tensors.values())
    rng = random.Random(7)
    path = tmp_path / "mutated.gguf"
    messages = []
    for _ in range(600):
        changed = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4, 32))):
            place = rng.randrange(first)
            match rng.randrange(3):
                case 0:
                    changed[place] ^= 1 << rng.randrange(8)
                case 1:
                    changed[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
                case 2:
                    changed[place : place + 8] = struct.pack("<Q", rng.getrandbits(64))
        path.write_bytes(changed)
        try:
            gguf.read_model(path)
        except ModelError as error:
            messages.append(str(error))
    assert 100 < len(messages) < 600
    assert not any("\n" in message for message in messages)


def test_model_checks(tmp_path: Path) -> None:
    def refuse(keys: list[bytes], message: str) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(header(keys, []))
        with pytest.raises(ModelError, match=message):
            gguf.read_model(path)

    def count(name: bytes, value: int) -> bytes:
        return key(b"llama." + name, 4, struct.pack("<I", value))

    refuse([], "no architecture")
    refuse([key(b"general.architecture", 4, bytes(4))], "no architecture")
    refuse([ARCH, count(b"block_count", 0)], "0 layers")
    refuse([ARCH, count(b"block_count", 513)], "513 layers")
    refuse([ARCH, count(b"block_count", 2), count(b"nextn_predict_layers", 3)], "3 NextN blocks")
    sections = key(b"llama.rope.dimension_sections", 9, struct.pack("<IQ2i", 5, 2, 4, 4))
    refuse([ARCH, sections, count(b"rope.dimension_count", 0)], "rotary sections of no dimension")


def test_split_files_are_read_together(small: Path, tmp_path: Path) -> None:
    def split(number: int, total: int, name: bytes) -> bytes:
        keys = [
            *([ARCH] if number == 0 else []),
            key(b"split.no", 2, struct.pack("<H", number)),
            key(b"split.count", 2, struct.pack("<H", total)),
        ]
        return header(keys, [tensor(name, (8,), 0, 0)], data=32)

    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(split(0, 2, b"a"))
    with pytest.raises(ModelError, match="00002-of-00002"):
        gguf.read_model(first)
    second.write_bytes(split(1, 2, b"b"))
    model = gguf.read_model(first)
    assert model.has_tensor("a")
    assert model.has_tensor("b")
    assert not model.has_tensor("c")
    os.rename(first, tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match="its name does not end in"):
        gguf.read_model(tmp_path / "renamed.gguf")
