"""What is installed, which machine this is and what a model is, as plain JSON types.

The records go into result files and are what ``mtpstats info`` shows.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mtpstats
from mtpstats.chat import ChatTemplate
from mtpstats.errors import AbiMismatch, LibraryNotFound, MtpStatsError

if TYPE_CHECKING:
    from mtpstats.llama import Build, Library, Model
    from mtpstats.llama.gguf import ModelHeader

PROBE_N_CTX = 256


def library(lib: Library) -> dict[str, Any]:
    """Return which libllama is loaded; nothing in it names a path of this machine."""
    return {"version": lib.version, **_build(lib.build)}


def _build(build: Build) -> dict[str, Any]:
    return {
        "key": build.key,
        "source": build.source,
        "source_version": build.version,
        "backend": build.backend,
        "flags": list(build.flags),
        "built": build.built,
    }


def devices(lib: Library) -> list[dict[str, Any]]:
    """Return the devices libllama sees; memory in bytes."""
    return [asdict(device) for device in lib.devices()]


def model(loaded: Model, draft: Model | None = None) -> dict[str, Any]:
    """Return a result file's ``model``; hashes are filled in by whoever reads the files.

    ``draft_model`` in it holds the same of the file that the head comes from, if it is another.
    """
    record = _model(loaded)
    if draft is not None:
        record["draft_model"] = _model(draft)
    return record


def _model(loaded: Model) -> dict[str, Any]:
    return {
        "file": loaded.path.name,
        "size": _size(loaded.header),
        "sha256": None,
        "architecture": loaded.arch,
        "parameters": loaded.n_params,
        "vocabulary": loaded.n_vocab,
        "nextn_blocks": loaded.n_layer_nextn,
        "quantisation": loaded.ftype,
        "layers": loaded.n_layer,
        "context": loaded.n_ctx_train,
        "embedding": loaded.n_embd,
        "description": loaded.desc,
        "chat_template": loaded.chat_template() is not None,
    }


def chat_template(loaded: Model) -> ChatTemplate:
    """Return the chat template that a model carries, with what it needs of the vocabulary."""

    def text(token: int) -> str:
        return loaded.piece(token).decode("utf-8", "replace") if token >= 0 else ""

    tool_use = loaded.chat_template("tool_use")
    add_bos, add_eos = loaded.adds
    return ChatTemplate(
        loaded.chat_template() or tool_use or "",
        tool_use=tool_use,
        bos=text(loaded.bos),
        eos=text(loaded.eos),
        add_bos=add_bos,
        add_eos=add_eos,
    )


def _size(header: ModelHeader) -> int:
    return sum(file.path.stat().st_size for file in header.files)


def installation(environ: Mapping[str, str] = os.environ) -> tuple[dict[str, Any], Library | None]:
    """Return what is installed, and the library that a run would use, loaded.

    ``problem`` says why there is none. Devices are listed only when one loads.
    """
    import numpy as np

    from mtpstats import _core, llama
    from mtpstats.llama import installed

    lib: Library | None = None
    used: dict[str, Any] | None = None
    problem = None
    try:
        lib = llama.load()
    except (LibraryNotFound, AbiMismatch) as error:
        problem = str(error)
    found = installed.builds(environ)
    if lib is not None:
        used = {"path": str(lib.path), "why": _why(len(found), environ), **library(lib)}
    record = {
        "mtpstats": mtpstats.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kernel": _core.isa(),
        "builds_directory": str(installed.builds_dir(environ)),
        "builds": [
            {
                **_build(build),
                "prefix": str(build.prefix),
                "used": lib is not None and _same(build.library, lib.path),
            }
            for build in found
        ],
        "library": used,
        "problem": problem,
        "devices": devices(lib) if lib is not None else [],
    }
    return record, lib


def _why(n_builds: int, environ: Mapping[str, str]) -> str:
    if environ.get("MTPSTATS_LIBLLAMA"):
        return "MTPSTATS_LIBLLAMA names it"
    return "the only build" if n_builds == 1 else f"the newest of {n_builds} builds"


def _same(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()


def inspect(
    path: Path,
    lib: Library | None,
    on_progress: Callable[[float], None] | None = None,
    draft_path: Path | None = None,
) -> dict[str, Any]:
    """Return what a model is and how its MTP head, or that of ``draft_path``, can be driven.

    Without a library only what the file's header says. ``on_progress`` hears the loading's share.
    Raises ``ModelError`` for a file that is no model or cannot be loaded.
    """
    from mtpstats import llama
    from mtpstats.llama import gguf

    if lib is None:
        return _from_header(gguf.read_model(path))
    with ExitStack() as stack:
        # No layer goes to a device: nothing is computed beyond what a probe needs.
        loaded, *drafts = (
            stack.enter_context(llama.Model(lib, file, n_gpu_layers=0, progress=on_progress))
            for file in (path, draft_path)
            if file is not None
        )
        record = model(loaded, *drafts)
        record["memory"] = (
            "hybrid (attention and recurrent)"
            if loaded.is_hybrid
            else "recurrent"
            if loaded.is_recurrent
            else "attention only"
        )
        record["drive"] = _drive(loaded, *drafts)
    return record


def _from_header(header: ModelHeader) -> dict[str, Any]:
    blocks = header.hparam("nextn_predict_layers") or 0
    layers = header.hparam("block_count")
    return {
        "file": header.first.path.name,
        "size": _size(header),
        "sha256": None,
        "architecture": header.arch,
        "parameters": None,
        "vocabulary": None,
        "nextn_blocks": blocks,
        "quantisation": None,
        "layers": layers - blocks if layers is not None else None,
        "context": header.hparam("context_length"),
        "embedding": header.hparam("embedding_length"),
        "description": None,
        "memory": None,
        "drive": {
            "possible": None,
            "heads": None,
            "rollback": None,
            "reason": "only libllama can tell, and none is installed",
        },
    }


def _drive(loaded: Model, draft_model: Model | None = None) -> dict[str, Any]:
    """Try it: contexts as a run makes them, only small."""
    from mtpstats import llama
    from mtpstats.llama import arch
    from mtpstats.speculate import DraftSettings, Speculator

    head = draft_model or loaded
    known = arch.KNOWN.get(head.arch)
    heads = known.heads if known else ("single" if head.n_layer_nextn <= 1 else "chain")
    reason = head.mtp_obstacle()
    rollback = None
    if reason is None:
        n_ctx = min(PROBE_N_CTX, loaded.n_ctx_train or PROBE_N_CTX)
        draft = DraftSettings()
        try:
            with llama.Context(loaded, n_ctx=n_ctx, n_rs_seq=draft.n_max) as target:
                rollback = target.rollback
            Speculator(loaded, draft=draft, draft_model=draft_model, n_ctx=n_ctx).close()
        except MtpStatsError as error:
            reason = str(error)
    return {
        "possible": reason is None,
        "heads": heads if head.n_layer_nextn or heads == "shared" else None,
        "rollback": rollback,
        "reason": reason,
    }
