"""Where libllama builds are looked for, and what their manifests say."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpstats.errors import AbiMismatch, LibraryNotFound
from mtpstats.text import printable

SCHEMA = "mtpstats.abi/1"
MANIFEST = "abi.json"
_LARGEST_MANIFEST = 1 << 20
# Without a leading underscore, which would be a name of ctypes' own.
_C_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Build:
    """One installed build of libllama: ``prefix`` holds ``lib/``, ``bin/`` and ``abi.json``."""

    key: str
    prefix: Path
    library: Path
    manifest: Mapping[str, Any]

    @property
    def source(self) -> str:
        """Name of the source it was built from."""
        return str(self.manifest.get("source", {}).get("name", "unknown"))

    @property
    def version(self) -> str:
        """llama.cpp's version as the source gives it."""
        return str(self.manifest.get("source", {}).get("version", "unknown"))

    @property
    def backend(self) -> str:
        """``cpu``, ``cuda``, ... as asked for at build time."""
        return str(self.manifest.get("backend", "unknown"))

    @property
    def flags(self) -> tuple[str, ...]:
        """Whatever else distinguishes the build."""
        names = [name for name in ("portable", "rpc", "tools") if self.manifest.get(name)]
        return (*names, *(str(arg) for arg in self.manifest.get("cmake_args", [])))

    @property
    def built(self) -> str:
        """Time of the build, ISO 8601 UTC."""
        return str(self.manifest.get("built", ""))

    @property
    def tools(self) -> bool:
        """Whether llama.cpp's own programs are in ``bin/``."""
        return bool(self.manifest.get("tools"))

    @property
    def rpc(self) -> bool:
        """Whether ggml's RPC backend was built."""
        return bool(self.manifest.get("rpc"))


def builds_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory ``build_llama.sh`` installs to."""
    if environ.get("MTPSTATS_BUILDS"):
        return Path(environ["MTPSTATS_BUILDS"])
    # Unlike Path.home() it stays "~" for a user without a home, as in some containers.
    data = environ.get("XDG_DATA_HOME") or Path(os.path.expanduser("~"), ".local", "share")
    return Path(data) / "mtpstats" / "builds"


def builds(environ: Mapping[str, str] = os.environ) -> list[Build]:
    """Return the usable builds under ``builds_dir``, newest first."""
    root = builds_dir(environ)
    found = []
    try:
        manifests = sorted(root.glob(f"*/{MANIFEST}"))
    except OSError:  # a name that no directory can have
        return []
    for manifest in manifests:
        try:
            build = read(manifest.parent)
        except (AbiMismatch, LibraryNotFound):
            continue
        if build.library.is_file():
            found.append(build)
    return sorted(found, key=lambda build: build.built, reverse=True)


def read(prefix: Path) -> Build:
    """Read the build at ``prefix``. Raises LibraryNotFound or AbiMismatch."""
    path = prefix / MANIFEST
    shown = printable(str(path))
    try:
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise AbiMismatch(f"{shown}: too large for a manifest; rebuild with ./build_llama.sh")
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LibraryNotFound(f"{shown}: {error.strerror}; run ./build_llama.sh") from None
    except (ValueError, RecursionError):
        raise AbiMismatch(f"{shown}: not a JSON manifest; rebuild with ./build_llama.sh") from None
    _check_form(manifest, shown)
    library = prefix / str(manifest["library"])
    return Build(str(manifest.get("key", prefix.name)), prefix, library, manifest)


def _plain(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _check_form(manifest: Any, shown: str) -> None:
    def refuse(what: str) -> AbiMismatch:
        return AbiMismatch(f"{shown}: {what}; rebuild with ./build_llama.sh")

    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        raise refuse(f"schema is {printable(repr(schema))}, not {SCHEMA}")
    for name, kind in (("library", str), ("structs", dict), ("symbols", dict), ("files", dict)):
        if not isinstance(manifest.get(name), kind):
            raise refuse(f"'{name}' is missing or of the wrong kind")
    for name in ("source", "enums"):
        if not isinstance(manifest.get(name, {}), dict):
            raise refuse(f"'{name}' is of the wrong kind")
    if not isinstance(manifest.get("cmake_args", []), list):
        raise refuse("'cmake_args' is of the wrong kind")
    for name in ("symbols", "files"):
        if not all(isinstance(value, str) for value in manifest[name].values()):
            raise refuse(f"'{name}' holds something that is no text")
    # What no file and no C name can hold; the system's calls would raise ValueError.
    if not all(map(_plain, (manifest["library"], *manifest["files"]))):
        raise refuse("a file's name in it cannot be one")
    for name, layout in manifest["structs"].items():
        fields = layout.get("fields") if isinstance(layout, dict) else None
        if not isinstance(fields, dict) or not isinstance(layout.get("size"), int):
            raise refuse(f"structs.{printable(name)} has no size and fields")
        for field, place in fields.items():
            if not _C_NAME.fullmatch(field):
                raise refuse(f"structs.{printable(name)}.{printable(field)} is no field's name")
            if not (
                isinstance(place, list) and len(place) == 2 and all(type(n) is int for n in place)
            ):
                raise refuse(f"structs.{printable(name)}.{printable(field)} is not [offset, size]")


def locate(path: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> Build:
    """Find the build to load: argument, ``MTPSTATS_LIBLLAMA``, newest build.

    ``path`` is a library file or a build's prefix. Raises LibraryNotFound with every place tried,
    AbiMismatch for a library without a manifest.
    """
    tried = []
    variable = "MTPSTATS_LIBLLAMA"
    for origin, given in (("argument", path), (variable, environ.get(variable))):
        if given:
            return _from_path(Path(given), origin)
        tried.append(f"{origin} (not given)")
    found = builds(environ)
    if found:
        return found[0]
    tried.append(printable(str(builds_dir(environ) / "*" / MANIFEST)))
    raise LibraryNotFound(f"no libllama found; tried {', '.join(tried)}; run ./build_llama.sh")


def _from_path(path: Path, origin: str) -> Build:
    shown = printable(str(path))
    if os.path.isdir(path):
        if (path / MANIFEST).is_file():
            return read(path)
        raise LibraryNotFound(
            f"{shown} (from {origin}) is not a build: it has no {MANIFEST}; run ./build_llama.sh"
        )
    if not os.path.isfile(path):
        raise LibraryNotFound(f"{shown} (from {origin}) does not exist; run ./build_llama.sh")
    for prefix in (path.parent, path.parent.parent):
        if (prefix / MANIFEST).is_file():
            build = read(prefix)
            if build.library.resolve() != path.resolve():
                raise AbiMismatch(
                    f"{shown}: the manifest beside it is for {printable(str(build.library))}"
                )
            return build
    raise AbiMismatch(
        f"{shown} (from {origin}) has no {MANIFEST} beside it, so its layout is unknown; "
        "run ./build_llama.sh"
    )
