"""GGUF files in parts: taken apart, changed, and laid out anew, also as no sound file is."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q",
           11: "<q", 12: "<d"}  # fmt: skip
U32, I32, F32 = 4, 5, 6


@dataclass(frozen=True)
class Key:
    """A metadata entry. ``items``: an array's elements; ``raw`` is the value of any other kind."""

    name: bytes
    kind: int
    raw: bytes = b""
    element: int = 0
    items: tuple[bytes, ...] = ()
    count: int | None = None  # as told, where it is not the number of elements

    def encode(self) -> bytes:
        head = string(self.name) + struct.pack("<I", self.kind)
        if self.kind != ARRAY:
            return head + self.raw
        count = len(self.items) if self.count is None else self.count
        return head + struct.pack("<IQ", self.element, count) + b"".join(self.items)

    @property
    def value(self) -> Any:
        """The scalar or text."""
        if self.kind == STRING:
            return self.raw[8:].decode("utf-8", "replace")
        return struct.unpack(SCALARS[self.kind], self.raw)[0]


@dataclass(frozen=True)
class Info:
    """A tensor with its data. ``offset`` and ``n_dims`` only where they are not the true ones."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    data: bytes
    offset: int | None = None
    n_dims: int | None = None


@dataclass(frozen=True)
class File:
    """A GGUF file in parts."""

    keys: tuple[Key, ...]
    infos: tuple[Info, ...]
    alignment: int = 32
    magic: bytes = b"GGUF"
    version: int = 3
    n_keys: int | None = None
    n_infos: int | None = None

    def encode(self) -> bytes:
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        n_infos = len(self.infos) if self.n_infos is None else self.n_infos
        parts = [self.magic, struct.pack("<IQQ", self.version, n_infos, n_keys)]
        parts += [key.encode() for key in self.keys]
        place, blocks = 0, []
        for info in self.infos:
            n_dims = len(info.shape) if info.n_dims is None else info.n_dims
            parts += [
                string(info.name),
                struct.pack("<I", n_dims & 0xFFFFFFFF),
                *(struct.pack("<Q", extent % (1 << 64)) for extent in info.shape),
                struct.pack("<IQ", info.kind, place if info.offset is None else info.offset),
            ]
            block = info.data + bytes(-len(info.data) % self.alignment)
            place += len(block)
            blocks.append(block)
        head = b"".join(parts)
        return b"".join([head, bytes(-len(head) % self.alignment), *blocks])

    def with_key(self, name: bytes, *keys: Key) -> File:
        """Put ``keys`` in the place of the one of that name."""
        changed = [new for old in self.keys for new in (keys if old.name == name else (old,))]
        return replace(self, keys=tuple(changed))

    def with_info(self, name: bytes, *infos: Info) -> File:
        """Put ``infos`` in the place of the one of that name."""
        changed = [new for old in self.infos for new in (infos if old.name == name else (old,))]
        return replace(self, infos=tuple(changed))


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def parse(content: bytes) -> File:
    """Take a sound file apart."""
    place = 24

    def take(fmt: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(fmt, content, place)
        place += struct.calcsize(fmt)
        return value

    def text() -> bytes:
        nonlocal place
        length = take("<Q")
        place += length
        return content[place - length : place]

    def raw(kind: int) -> bytes:
        nonlocal place
        if kind == STRING:
            return string(text())
        size = struct.calcsize(SCALARS[kind])
        place += size
        return content[place - size : place]

    n_infos, n_keys = struct.unpack_from("<QQ", content, 8)
    keys = []
    for _ in range(n_keys):
        name, kind = text(), take("<I")
        if kind == ARRAY:
            element, count = take("<I"), take("<Q")
            items = tuple(raw(element) for _ in range(count))
            keys.append(Key(name, kind, b"", element, items))
        else:
            keys.append(Key(name, kind, raw(kind)))
    table = []
    for _ in range(n_infos):
        name = text()
        shape = tuple(take("<Q") for _ in range(take("<I")))
        table.append((name, shape, take("<I"), take("<Q")))
    start = -(-place // 32) * 32
    ends = [offset for _, _, _, offset in table[1:]] + [len(content) - start]
    infos = tuple(
        Info(name, shape, kind, content[start + offset : start + end])
        for (name, shape, kind, offset), end in zip(table, ends, strict=True)
    )
    return File(tuple(keys), infos)


def key_of(name: str, value: Any) -> Key:
    """Return a metadata entry of the type converters give such a value."""
    encoded = name.encode()
    match value:
        case bool():
            return Key(encoded, BOOL, bytes([value]))
        case int():
            return Key(encoded, U32, struct.pack("<I", value))
        case float():
            return Key(encoded, F32, struct.pack("<f", value))
        case str():
            return Key(encoded, STRING, string(value.encode()))
        case list():
            items = tuple(struct.pack("<i", (item + (1 << 31)) % (1 << 32) - (1 << 31))
                          for item in value)  # fmt: skip
            return Key(encoded, ARRAY, element=I32, items=items)
        case _:
            raise TypeError(name)
