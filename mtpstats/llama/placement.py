"""Where a model's tensors go: devices, how they share the model, tensors placed by name."""

from __future__ import annotations

import ctypes
import math
import os
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtpstats.errors import AbiMismatch, InputError
from mtpstats.llama import installed
from mtpstats.text import printable

if TYPE_CHECKING:
    from mtpstats.llama.library import Library

SPLIT_MODES = ("none", "layer", "row", "tensor")
CONNECT_S = 5.0
ANSWER_S = 10.0
# llama.cpp compiles it again for every tensor, and in deep recursion.
_LONGEST_PATTERN = 1000


@dataclass(frozen=True)
class Placement:
    """llama.cpp's options of these names; what is not given is left to llama.cpp.

    ``devices``: names, in the order in which they get layers; empty: nothing is offloaded.
    ``split_mode``: one of ``SPLIT_MODES``. ``tensor_split``: proportions, one per device, the rest
    get nothing. ``main_gpu``: index of a device. ``override_tensor``: (regular expression, buffer
    type); tensors whose name matches go there, the first that matches wins.
    """

    devices: tuple[str, ...] | None = None
    split_mode: str | None = None
    tensor_split: tuple[float, ...] = ()
    main_gpu: int | None = None
    override_tensor: tuple[tuple[str, str], ...] = ()

    def apply(self, lib: Library, params: Any) -> list[Any]:
        """Set the fields of ``llama_model_params``; what is returned must outlive the model.

        Raises InputError for what this machine or build does not have, AbiMismatch where the
        build's manifest lacks a field.
        """
        usable = lib.offload_devices()
        keep: list[Any] = []
        if self.devices is not None:
            chosen = [_device(name, usable) for name in self.devices]
            keep.append((ctypes.c_void_p * (len(chosen) + 1))(*chosen, None))
            _set(lib, params, "devices", ctypes.addressof(keep[-1]))
        n_devices = len(usable) if self.devices is None else len(self.devices)
        if self.split_mode is not None:
            value = _split_mode(lib, self.split_mode, n_devices)
            _set(lib, params, "split_mode", value)
        if self.tensor_split:
            _check_split(self.tensor_split, n_devices)
            shares = (ctypes.c_float * lib.fn.llama_max_devices())(*self.tensor_split)
            keep.append(shares)
            _set(lib, params, "tensor_split", ctypes.addressof(shares))
        if self.main_gpu is not None:
            # 0 is llama.cpp's default, also where there is none.
            if not 0 <= self.main_gpu < max(n_devices, 1):
                raise InputError(f"main GPU {self.main_gpu}: {_numbered(n_devices)}")
            _set(lib, params, "main_gpu", self.main_gpu)
        if self.override_tensor:
            keep.append(_overrides(lib, self.override_tensor))
            _set(lib, params, "tensor_buft_overrides", ctypes.addressof(keep[-1][0]))
        return keep


def _set(lib: Library, params: Any, field: str, value: Any) -> None:
    if not hasattr(params, field):
        raise AbiMismatch(
            f"{printable(str(lib.prefix))}: its manifest has no llama_model_params.{field}; "
            "rebuild libllama with ./build_llama.sh"
        )
    setattr(params, field, value)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def _numbered(n_devices: int) -> str:
    if not n_devices:
        return "there is no device to offload to"
    return f"devices are numbered 0 to {n_devices - 1}" if n_devices > 1 else "there is only one, 0"


def _device(name: str, usable: Mapping[str, int]) -> int:
    if name not in usable:
        raise InputError(
            f"no device {printable(name)} to offload to; there is: {_listed(list(usable))}"
        )
    return usable[name]


def _split_mode(lib: Library, name: str, n_devices: int) -> int:
    enums = lib.manifest.get("enums", {})
    known = {mode: enums.get(f"LLAMA_SPLIT_MODE_{mode.upper()}") for mode in SPLIT_MODES}
    value = known.get(name)
    if not isinstance(value, int):
        has = [mode for mode, number in known.items() if isinstance(number, int)]
        raise InputError(f"no split mode {printable(name)} in this build; there is: {_listed(has)}")
    if name in ("row", "tensor") and not n_devices:
        raise InputError(f"split mode {name}: there is no device to offload to")
    return value


def _check_split(shares: Sequence[float], n_devices: int) -> None:
    shown = ",".join(f"{share:g}" for share in shares)
    if not all(math.isfinite(share) and share >= 0 for share in shares) or not sum(shares) > 0:
        raise InputError(
            f"tensor split {shown}: proportions of 0 or more are possible, not all of them 0"
        )
    if len(shares) > n_devices:
        raise InputError(f"tensor split {shown} is for {len(shares)} devices: {_has(n_devices)}")


def _has(n_devices: int) -> str:
    return "there is one" if n_devices == 1 else f"there are {n_devices or 'none'}"


def _overrides(lib: Library, pairs: Sequence[tuple[str, str]]) -> tuple[Any, list[Any]]:
    """Return the array of overrides, ended by an empty one, and the strings it points to."""
    types = lib.buffer_types()
    made = lib.structure("llama_model_tensor_buft_override")
    array = (made * (len(pairs) + 1))()
    patterns = []
    for item, (pattern, buffer_type) in zip(array, pairs, strict=False):
        if len(pattern) > _LONGEST_PATTERN:
            raise InputError(
                f"a pattern of {len(pattern):,} characters for tensor names; up to "
                f"{_LONGEST_PATTERN:,} are possible: give several -ot"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "[[:alpha:]]" means more to C++ than to Python
                re.compile(pattern)
        except re.error as error:
            raise InputError(
                f"{printable(pattern)} is not a regular expression of tensor names: {error}"
            ) from None
        if buffer_type not in types:
            raise InputError(
                f"no buffer type {printable(buffer_type)}; there is: {_listed(list(types))}"
            )
        patterns.append(ctypes.create_string_buffer(os.fsencode(pattern)))
        item.pattern = ctypes.addressof(patterns[-1])
        item.buft = types[buffer_type]
    return array, patterns


def check_server(lib: Library, server: str) -> tuple[str, int]:
    """Return the address and port of an RPC server, the same for all of its names.

    Raises InputError for one that cannot be reached; libllama would abort.
    """
    shown = printable(server)
    if not lib.supports_rpc:
        others = [build.prefix for build in installed.builds() if build.rpc]
        hint = f", or set MTPSTATS_LIBLLAMA={printable(str(others[0]))}" if others else ""
        raise InputError(
            f"RPC server {shown}: this libllama was built without RPC; "
            f"run ./build_llama.sh --rpc{hint}"
        )
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"RPC server {shown} is not of the form host:port")
    try:
        # As ggml does it: IPv4 only.
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
        with socket.socket(socket.AF_INET) as probe:
            probe.settimeout(CONNECT_S)
            probe.connect(found[0][4])
            address: tuple[str, int] = probe.getpeername()
            return address
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"RPC server {shown} cannot be reached: {why}; is rpc-server running there?"
        ) from None
