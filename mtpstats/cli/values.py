"""Readers of option values: what a word on the command line stands for, or why it does not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_FLASH_ATTN = {
    "on": ("on", "enabled", "true", "1"),
    "off": ("off", "disabled", "false", "0"),
    "auto": ("auto", "-1"),
}


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str | int], int]:
    """Return what reads an integer between the bounds."""

    def read(value: str | int) -> int:
        try:
            number = int(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a whole number.") from None
        if not low <= number <= high:
            raise click.BadParameter(f"{number} is not in the range {low} to {high}.")
        return number

    return read


def real(low: float, high: float = math.inf) -> Callable[[str | float], float]:
    """Return what reads a number between the bounds; nan, which passes comparisons, is refused."""

    def read(value: str | float) -> float:
        try:
            number = float(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a number.") from None
        if not math.isfinite(number) or not low <= number <= high:
            bounds = f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"
            raise click.BadParameter(f"{value} is not in the range {bounds}.")
        return number

    return read


def gpu_layers(value: str | int) -> int:
    """Read ``-ngl``: a count, or ``auto``, ``all`` or less than 0: -1, libllama's word for all."""
    if value in ("auto", "all"):
        return -1
    try:
        layers = int(value)
    except ValueError:
        layers = 2**31
    if not -(2**31) <= layers < 2**31:
        raise click.BadParameter(f"{value!r} is neither a number of layers nor auto nor all.")
    return max(layers, -1)


def flash_attn(value: str) -> str:
    """Read ``-fa`` with all the words llama.cpp has for it."""
    for mode, words in _FLASH_ATTN.items():
        if value in words:
            return mode
    raise click.BadParameter(f"{value!r} is neither on nor off nor auto.")


def top_k(value: str | int) -> int:
    """Read ``--top-k``; below 0 is off, too."""
    return max(whole(-(2**31))(value), 0)


def names(value: str) -> tuple[str, ...] | None:
    """Read ``-dev``: names with commas between, () for ``none``."""
    if value == "none":
        return ()
    names = tuple(value.split(","))
    if not all(names):
        raise click.BadParameter(f"{value!r} has an empty name in it.")
    return names


def shares(value: str) -> tuple[float, ...]:
    """Read ``-ts``: numbers with commas or slashes between."""
    return tuple(real(0)(share) for share in re.split("[,/]+", value))


def override(value: str) -> tuple[tuple[str, str], ...]:
    """Read ``-ot``: PATTERN=TYPE with commas between."""
    pairs = [item.partition("=") for item in value.split(",")]
    for pattern, _, buffer_type in pairs:
        if not pattern or not buffer_type:
            raise click.BadParameter(f"{value!r} is not of the form PATTERN=TYPE,...")
    return tuple((pattern, buffer_type) for pattern, _, buffer_type in pairs)


def servers(value: str) -> tuple[str, ...]:
    """Read ``--rpc``: host:port with commas between."""
    servers = tuple(value.split(","))
    for server in servers:
        host, _, port = server.rpartition(":")
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise click.BadParameter(f"{server!r} is not of the form HOST:PORT.")
    return servers


def duration(value: str | float) -> float:
    """Read a time: seconds, or a number with its unit."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([smh]?)", str(value))
    seconds = float(found[1]) * {"m": 60, "h": 3600}.get(found[2], 1) if found else 0.0
    if not 0 < seconds < math.inf:
        raise click.BadParameter(f"{value!r} is no time such as 90s, 45m or 2h.")
    return seconds


class File(click.Path):
    """A path. An empty one, of a variable that was not set, would be the current directory."""

    def __init__(self, written: bool) -> None:
        super().__init__(path_type=Path)
        self.written = written

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Refuse an empty name; else as it stands."""
        if value == "":
            self.fail("the file name is empty.", param, ctx)
        return super().convert(value, param, ctx)


def file(written: bool = False) -> File:
    """Return what reads a path, of a file that is ``written`` or else read."""
    return File(written)


def share(value: str) -> float:
    """Read a percentage, with or without its sign, as a share."""
    return real(0, 100)(value.removesuffix("%").rstrip()) / 100


def json_object(value: str | dict[str, Any]) -> dict[str, Any]:
    """Read a JSON object."""
    from mtpstats import reading

    try:
        found = reading.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object such as '{{\"key\": true}}'.")
    return found
