"""Find, load and check libllama. Nothing is loaded at import."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpstats.errors import AbiMismatch, InputError, LibraryNotFound
from mtpstats.llama import functions, installed, placement, structs
from mtpstats.llama.abort import LastWords
from mtpstats.llama.functions import ABORT, ADD_SERVER
from mtpstats.llama.log import CALLBACK, LEVELS, Log
from mtpstats.text import printable

_STRUCTS = ("llama_model_params", "llama_context_params", "llama_batch")
_DEFAULTS = {
    "llama_model_params": "llama_model_default_params",
    "llama_context_params": "llama_context_default_params",
}
# Backends that bring kernels for every GPU reach a gigabyte; a second of hashing per start is
# too much. libllama and ggml's own libraries are below this by far.
_LARGEST_HASHED = 64 << 20

_lock = threading.Lock()
_loaded: dict[Path, Library] = {}


@dataclass(frozen=True)
class Device:
    """One compute device ggml sees. Memory in bytes, 0 where the backend does not tell."""

    name: str
    description: str
    type: str
    backend: str
    memory_free: int
    memory_total: int


_DEVICE_TYPES = {
    structs.CONSTANTS[f"GGML_BACKEND_DEVICE_TYPE_{name.upper()}"]: name
    for name in ("cpu", "gpu", "igpu", "accel", "meta")
}


class Library:
    """A loaded and checked libllama. Made by ``load``; lives until the process ends.

    ``fn`` holds the typed functions, ``structs`` the structures by name, ``log`` what llama.cpp
    logged last.
    """

    def __init__(self, build: installed.Build) -> None:
        """Load ``build`` and run every check of its manifest; raises AbiMismatch."""
        self.build = build
        self.prefix = build.prefix
        self.path = build.library
        self.manifest = build.manifest
        self.log = Log()
        where = printable(str(build.prefix / installed.MANIFEST))
        self.structs: dict[str, type[ctypes.Structure]] = {}
        for name in _STRUCTS:
            self.structure(name)
        structs.check_constants(self.manifest.get("enums", {}), where)
        _check_hashes(build)
        self._cdll = _open(build)
        for name, symbol in _DEFAULTS.items():
            try:
                function = self._cdll[symbol]
            except AttributeError:
                raise AbiMismatch(f"{where}: the library has no symbol {symbol}") from None
            layout = self.manifest["structs"][name]
            structs.check_defaults(name, self.structs[name], layout, function, where)
        self.fn = functions.bind(self._cdll, self.manifest, self.structs, self.log, where)
        self._rpc_servers: dict[str, tuple[str, int]] = {}
        self._last_words: LastWords | None = None
        # Models in the order of their creation; each closes its contexts first.
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._start()

    def _start(self) -> None:
        self.fn.llama_log_set(self.log.callback, None)
        self.fn.llama_backend_init()
        if self.fn.ggml_backend_dev_count() == 0:
            # Backends built as plug-ins lie beside the library.
            self.fn.ggml_backend_load_all_from_path(os.fsencode(self.path.parent))
        # After the interpreter is gone the callback must not be called any more.
        atexit.register(self._shut_down)

    def _shut_down(self) -> None:
        for model in list(self.models):
            model.close()
        self.fn.llama_log_set(CALLBACK(), None)

    def structure(self, name: str) -> type[ctypes.Structure]:
        """Return the structure as the manifest lays it out; raises AbiMismatch."""
        if name not in self.structs:
            where = printable(str(self.prefix / installed.MANIFEST))
            layout = self.manifest["structs"].get(name)
            if layout is None:
                raise AbiMismatch(f"{where}: {name} is missing; rebuild with ./build_llama.sh")
            self.structs[name] = structs.build(name, layout, where)
        return self.structs[name]

    @property
    def version(self) -> str:
        """llama.cpp's version, from the library itself where it tells."""
        if self.fn.has("llama_version"):
            return printable(self.fn.llama_version() or b"")
        return self.build.version

    @property
    def supports_rpc(self) -> bool:
        """Whether ggml's RPC backend is present."""
        return bool(self.fn.llama_supports_rpc())

    @property
    def max_sequences(self) -> int:
        """Most sequences a context can hold."""
        return int(self.fn.llama_max_parallel_sequences())

    def devices(self) -> list[Device]:
        """Return the devices ggml sees, in its order."""
        found = []
        for device in self._device_pointers():
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            self.fn.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            kind = self.fn.ggml_backend_dev_type(device)
            registry = self.fn.ggml_backend_dev_backend_reg(device)
            found.append(
                Device(
                    name=printable(self.fn.ggml_backend_dev_name(device) or b""),
                    description=printable(self.fn.ggml_backend_dev_description(device) or b""),
                    type=_DEVICE_TYPES.get(kind, f"type {kind}"),
                    backend=printable(self.fn.ggml_backend_reg_name(registry) or b"")
                    if registry
                    else "",
                    memory_free=free.value,
                    memory_total=total.value,
                )
            )
        return found

    def _device_pointers(self) -> list[int]:
        return [
            self.fn.ggml_backend_dev_get(index) for index in range(self.fn.ggml_backend_dev_count())
        ]

    def offload_devices(self) -> dict[str, int]:
        """Return ``ggml_backend_dev_t`` of each device that can hold layers by name, in order."""
        return {
            printable(self.fn.ggml_backend_dev_name(device) or b""): device
            for device in self._device_pointers()
            if _DEVICE_TYPES.get(self.fn.ggml_backend_dev_type(device)) not in ("cpu", "accel")
        }

    def buffer_types(self) -> dict[str, int]:
        """Return the devices' ``ggml_backend_buffer_type_t`` by name."""
        types = map(self.fn.ggml_backend_dev_buffer_type, self._device_pointers())
        return {printable(self.fn.ggml_backend_buft_name(one) or b""): one for one in types}

    def add_rpc_server(self, server: str) -> None:
        """Make the devices of ``rpc-server`` at ``host:port`` devices of this library.

        Once added they stay; the same server again is none more, whatever it is called: it would
        wait for its first client, this process, to end. Raises InputError for one that cannot be
        reached, says nothing, as one that serves another client, or a build without RPC. libllama
        aborts the process on any later failure.
        """
        if server in self._rpc_servers:
            return
        address = placement.check_server(self, server)
        if address in self._rpc_servers.values():
            return
        backend = self.fn.ggml_backend_reg_by_name(b"RPC")
        found = self.fn.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_add_server")
        answers: list[Any] = []
        # libllama would wait for ever, and Ctrl-C with it.
        asking = threading.Thread(
            target=lambda: answers.append(ADD_SERVER(found)(server.encode())), daemon=True
        )
        asking.start()
        asking.join(placement.ANSWER_S)
        if not answers:
            raise InputError(
                f"RPC server {printable(server)} does not answer: it serves one client at a time, "
                "or something else listens there"
            )
        (registry,) = answers
        if not registry:
            raise InputError(f"RPC server {printable(server)} has no device")
        self.fn.ggml_backend_register(registry)
        self._rpc_servers[server] = address

    def verbose(self, listener: Callable[[str, str], None] | None) -> None:
        """Send every log line to ``listener(level, line)``; None stops it.

        Levels are ``debug``, ``info``, ``warning``, ``error``. An exception in the listener
        silences it.
        """
        if listener is None:
            self.log.listener = None
        else:
            self.log.listener = lambda level, line: listener(LEVELS.get(level, "info"), line)

    def on_abort(self, listener: Callable[[str], None] | None) -> None:
        """Tell ``listener`` what failed inside llama.cpp; the process is aborted afterwards.

        It is called once, on any thread, and should end the process its own way. None: llama.cpp
        prints it. Versions without such a callback tell no more than that it was SIGABRT.
        """
        if self._last_words is not None:
            self._last_words.close()
        self._last_words = LastWords(listener) if listener is not None else None
        callback = ABORT()
        if self._last_words is not None:
            self._last_words.open()
            callback = self._last_words.callback
        if self.fn.has("ggml_set_abort_callback"):
            self.fn.ggml_set_abort_callback(ctypes.cast(callback, ctypes.c_void_p))

    def __repr__(self) -> str:
        """Path and version."""
        return f"<libllama {self.version} at {printable(str(self.path))}>"


def load(path: str | os.PathLike[str] | None = None) -> Library:
    """Load libllama, checked against its ABI manifest; the same library twice is the same object.

    ``path`` is a library file or a build's prefix; without it ``MTPSTATS_LIBLLAMA`` counts, then
    the newest build ``build_llama.sh`` installed. Raises LibraryNotFound (every place tried),
    AbiMismatch (the field, file or symbol).
    """
    build = installed.locate(path)
    key = build.library.resolve()
    with _lock:
        for other, library in _loaded.items():
            if other == key and library.manifest == build.manifest:
                return library
            if other != key:
                # The ggml libraries of both have the same names: the second would get the first's.
                raise AbiMismatch(
                    f"{printable(str(other))} is loaded in this process already; "
                    f"{printable(str(key))} needs a process of its own"
                )
        library = Library(build)
        _loaded[key] = library
        return library


def _check_hashes(build: installed.Build) -> None:
    listed = build.manifest["files"]
    names = {build.library.resolve()}
    for name, expected in listed.items():
        file = build.prefix / name
        shown = printable(str(file))
        if not name.startswith("lib/"):
            continue
        try:
            if file.stat().st_size > _LARGEST_HASHED:
                continue
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise LibraryNotFound(f"{shown}: {error.strerror}; run ./build_llama.sh") from None
        names.discard(file.resolve())
        if digest != expected:
            raise AbiMismatch(
                f"{shown} is not the file its manifest was made for (sha256 differs); "
                "rebuild with ./build_llama.sh"
            )
    if names:
        raise AbiMismatch(
            f"{printable(str(build.library))} is not among the files of its manifest; "
            "rebuild with ./build_llama.sh"
        )


def _open(build: installed.Build) -> ctypes.CDLL:
    # ggml would start a debugger on an abort; an assertion's text is enough.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    # By full path and before libllama, so that its dependencies are these very files whatever
    # LD_LIBRARY_PATH says. Plug-in backends are ggml's business: it picks what the CPU can run.
    if "-DGGML_BACKEND_DL=ON" not in build.manifest.get("cmake_args", []):
        names = [name for name in build.manifest["files"] if name.startswith("lib/libggml")]
        for name in sorted(names, key=_load_order):
            _keep_open(build.prefix / name)
    try:
        return ctypes.CDLL(str(build.library.resolve()))
    except OSError as error:
        raise LibraryNotFound(
            f"{printable(str(build.library))} cannot be loaded: {printable(str(error))}; "
            "run ./build_llama.sh"
        ) from None


def _load_order(name: str) -> tuple[bool, bool, str]:
    # Everything needs libggml-base; libggml needs the backends.
    return "libggml-base" not in name, "libggml." in name, name


def _keep_open(file: Path) -> None:
    try:
        ctypes.CDLL(str(file))
    except OSError:
        # A driver library may be missing: libllama's own loading says so, or does without.
        return
