"""A strict reader of GGUF headers: metadata, and the names, shapes and types of the tensors.

libllama is given only files this reader accepted. Every count, length, type and offset is checked
against the size of the file before it is used, so a damaged or hostile file costs one pass over its
header and an exception.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

from mtpstats.errors import ModelError
from mtpstats.llama import hparams, tensors
from mtpstats.llama.vocabulary import TOKENS, Vocabulary
from mtpstats.text import printable

# ggml type -> (elements per block, bytes per block)
TYPE_SIZES: dict[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 36), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip

# GGUF value type -> struct format; 8 is a string, 9 an array
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip
_STRING, _ARRAY, _BOOL, _UINT32 = 8, 9, 7, 4
_EXACT = {"general.alignment": _UINT32, "split.no": 2}  # llama.cpp asserts these types
_MAX_NAME = 64  # GGML_MAX_NAME, terminating zero included
_MAX_KEY = 1 << 16
_MAX_DIMS = 4
_PLACED = 32  # TENSOR_ALIGNMENT of ggml's buffers
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_SPLIT_NAME = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$", re.DOTALL)


@dataclass(frozen=True)
class Array:
    """An array in the metadata: its element type and length.

    ``values`` are the numbers of a short one, such as those with a number per layer.
    """

    kind: int
    count: int
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """Name, shape (fastest dimension first), ggml type, and place of the data in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True)
class Gguf:
    """The header of one file."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    tokens: Sequence[bytes] = ()

    def integer(self, key: str) -> int | None:
        """Return the integer at ``key``, None if it is absent or no integer."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class ModelHeader:
    """The headers of all files of a model; the first holds the metadata."""

    files: tuple[Gguf, ...]
    arch: str
    vocabulary: Vocabulary

    @property
    def first(self) -> Gguf:
        """The file that was named."""
        return self.files[0]

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of all files."""
        return {name: tensor for file in self.files for name, tensor in file.tensors.items()}

    def has_tensor(self, name: str) -> bool:
        """Whether any of the files holds the tensor."""
        return name in self.tensors

    def hparam(self, name: str) -> int | None:
        """Return the integer ``{arch}.{name}``."""
        return self.first.integer(f"{self.arch}.{name}")


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.shown = printable(str(path))
        self.data = data
        self.end = len(data)
        self.pos = 0
        self.tokens: list[bytes] = []

    def fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self.shown}: {what}")

    def need(self, count: int, what: str) -> None:
        if count > self.end - self.pos:
            self.fail(f"truncated or damaged: {what} does not fit into the file")

    def scalar(self, fmt: str, what: str) -> Any:
        size = struct.calcsize(fmt)
        self.need(size, what)
        value = struct.unpack_from(fmt, self.data, self.pos)[0]
        self.pos += size
        return value

    def text(self, limit: int, what: str) -> str:
        length = self.scalar("<Q", what)
        self.need(length, what)
        if length > limit:
            self.fail(f"{what} is {length} bytes long")
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        return raw.decode("utf-8", "replace")

    def value(self, key: str) -> Any:
        what = f"metadata '{printable(key)}'"
        kind = self.scalar("<I", what)
        if kind == _STRING:
            return self.text(self.end, what)
        if kind == _ARRAY:
            kind, count = self.scalar("<I", what), self.scalar("<Q", what)
            values: tuple[Any, ...] = ()
            if kind == _STRING:
                self._strings(count, what, self.tokens if key == TOKENS else None)
            elif kind in _SCALARS:
                size = struct.calcsize(_SCALARS[kind]) * count
                self.need(size, what)
                if count <= _MAX_LAYERS:
                    letter = _SCALARS[kind][1]
                    values = struct.unpack_from(f"<{count}{letter}", self.data, self.pos)
                self.pos += size
            else:
                self.fail(f"{what} is an array of unknown type {kind}")
            return Array(kind, count, values)
        if kind not in _SCALARS:
            self.fail(f"{what} has unknown type {kind}")
        value = self.scalar(_SCALARS[kind], what)
        return bool(value) if kind == _BOOL else value

    def _strings(self, count: int, what: str, found: list[bytes] | None) -> None:
        self.need(8 * count, what)
        length_at = struct.Struct("<Q").unpack_from
        data, pos, last = self.data, self.pos, self.end - 8
        for _ in range(count):
            if pos > last:
                self.fail(f"truncated or damaged: {what} does not fit into the file")
            start = pos + 8
            pos = start + length_at(data, pos)[0]
            if found is not None:
                if pos - start > _MAX_KEY:
                    self.fail(f"a token of {pos - start} bytes")
                found.append(data[start:pos])
        self.pos = pos
        self.need(0, what)

    def header(self) -> tuple[int, dict[str, Any], int]:
        """Version, metadata, number of tensors."""
        magic = self.data[:4]
        if magic != b"GGUF":
            self.fail(f"not a GGUF file (it begins with {printable(repr(magic)[1:])})")
        self.pos = 4
        version = self.scalar("<I", "the version")
        if version & 0xFFFF == 0:
            self.fail("written for a machine of the other byte order")
        if version not in (2, 3):
            self.fail(f"GGUF version {version}; versions 2 and 3 are supported")
        n_tensors = self.scalar("<Q", "the number of tensors")
        n_keys = self.scalar("<Q", "the number of metadata keys")
        # The smallest key: length, one letter, type, one byte; the smallest tensor: length, no
        # dimensions, type, offset.
        self.need(n_keys * 14 + n_tensors * 24, f"{n_keys} keys and {n_tensors} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self.text(_MAX_KEY, "a metadata key")
            if not key:
                self.fail("a metadata key is empty")
            if key in metadata:
                self.fail(f"metadata '{printable(key)}' occurs twice")
            kind = _EXACT.get(key)
            if kind is not None and self.data[self.pos : self.pos + 4] != struct.pack("<I", kind):
                self.fail(f"metadata '{key}' is not a {'uint32' if kind == _UINT32 else 'uint16'}")
            metadata[key] = self.value(key)
        return version, metadata, n_tensors

    def tensors(self, count: int, alignment: int) -> dict[str, Tensor]:
        """Read the tensor table; offsets become absolute."""
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        expected = 0
        sizes: dict[str, int] = {}
        for _ in range(count):
            name = self.text(_MAX_NAME - 1, "a tensor name")
            what = f"tensor '{printable(name)}'"
            if name in found:
                self.fail(f"{what} occurs twice")
            n_dims = self.scalar("<I", what)
            if n_dims > _MAX_DIMS:
                self.fail(f"{what} has {n_dims} dimensions")
            shape = tuple(self.scalar("<Q", what) for _ in range(n_dims))
            kind, offset = self.scalar("<I", what), self.scalar("<Q", what)
            sizes[name] = self._bytes(shape, kind, what)
            if offset != expected:
                self.fail(f"{what} lies at offset {offset}, expected {expected}")
            expected += -(-sizes[name] // alignment) * alignment
            found[name] = (shape, kind, offset)
        start = -(-self.pos // alignment) * alignment
        for name, (_, _, offset) in found.items():
            if (start + offset) % _PLACED:
                self.fail(f"tensor '{printable(name)}' does not lie at a multiple of {_PLACED}")
            if start + offset + sizes[name] > self.end:
                self.fail(
                    f"truncated: tensor '{printable(name)}' ends at byte "
                    f"{start + offset + sizes[name]}, the file has {self.end}"
                )
        return {
            name: Tensor(name, shape, kind, start + offset, sizes[name])
            for name, (shape, kind, offset) in found.items()
        }

    def _bytes(self, shape: tuple[int, ...], kind: int, what: str) -> int:
        if kind not in TYPE_SIZES:
            self.fail(f"{what} has unknown type {kind}")
        per_block, block_bytes = TYPE_SIZES[kind]
        elements = 1
        for extent in shape:
            elements *= extent
            if not 0 < elements < 1 << 56:
                self.fail(f"{what} has an impossible shape {shape}")
        if shape and shape[0] % per_block:
            self.fail(f"{what} has rows of {shape[0]}, not a multiple of {per_block}")
        return elements // per_block * block_bytes


def _without_waiting(path: str, flags: int) -> int:
    # Opening a pipe that nobody writes to would wait for ever.
    return os.open(path, flags | os.O_NONBLOCK)


def read(path: str | os.PathLike[str]) -> Gguf:
    """Read the header of one GGUF file. Raises ModelError saying what is wrong with it."""
    path = Path(path)
    shown = printable(str(path))
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ModelError(f"{shown}: not a regular file")
            if info.st_size == 0:
                raise ModelError(f"{shown}: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                reader = _Reader(path, data)
                version, metadata, count = reader.header()
                alignment = metadata.get("general.alignment", 32)
                if alignment == 0 or alignment & (alignment - 1):
                    reader.fail(f"alignment {alignment} is not a power of two")
                tensors = reader.tensors(count, alignment)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{shown}: {printable(reason)}") from None
    return Gguf(path, version, metadata, tensors, reader.tokens)


def read_model(path: str | os.PathLike[str]) -> ModelHeader:
    """Read the header of a model and of its further split files; check what libllama would not.

    Raises ModelError.
    """
    first = read(path)
    shown = printable(str(first.path))

    def refuse(what: str) -> NoReturn:
        raise ModelError(f"{shown}: {what}")

    arch = first.metadata.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        refuse("no architecture in the metadata; this is not a model")
    vocabulary = Vocabulary.of(first.metadata, first.tokens)
    files = (replace(first, tokens=()), *_further_splits(first, refuse))
    header = ModelHeader(files, arch, vocabulary)
    for part in (vocabulary.check, partial(hparams.check, header), partial(tensors.check, header)):
        part(refuse)
    return header


def _further_splits(first: Gguf, refuse: Callable[[str], NoReturn]) -> list[Gguf]:
    count = first.integer("split.count") or 0
    if count <= 1:
        return []
    if first.integer("split.no") != 0:
        refuse("this is not the first file of a split model; name the one with -00001-of-")
    match = _SPLIT_NAME.match(first.path.name)
    if match is None or int(match[3]) != count:
        refuse(
            f"one of {count} split files, but its name does not end in -00001-of-{count:05}.gguf"
        )
    names = (f"{match[1]}-{number:05}-of-{count:05}.gguf" for number in range(2, count + 1))
    return [read(first.path.with_name(name)) for name in names]
