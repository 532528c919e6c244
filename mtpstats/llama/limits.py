"""What a context may be asked for: checked before libllama, which would abort or allocate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mtpstats.errors import InputError, ModelError
from mtpstats.llama import arch, hparams
from mtpstats.llama.structs import CONSTANTS
from mtpstats.text import printable

if TYPE_CHECKING:
    from mtpstats.llama.model import Model

_MAX_THREADS = 512  # GGML_MAX_N_THREADS
_CELLS = 256  # a cache holds a multiple of this
CACHE_TYPES = {
    name: CONSTANTS[f"GGML_TYPE_{name.upper()}"]
    for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
}
_FLOATS = [CACHE_TYPES[name] for name in ("f32", "f16", "bf16")]
FLASH_ATTN = {
    name: CONSTANTS[f"LLAMA_FLASH_ATTN_TYPE_{theirs}"]
    for name, theirs in (("auto", "AUTO"), ("off", "DISABLED"), ("on", "ENABLED"))
}


def check_settings(model: Model, fields: Mapping[str, Any], beyond_training: bool) -> None:
    """Refuse values of ``llama_context_params`` that cannot work; raises InputError."""
    if model.vocab_only:
        raise InputError(f"{printable(model.path.name)} was loaded without its weights")

    def bounds(name: str, low: int, high: int) -> None:
        if not low <= fields[name] <= high:
            raise InputError(f"{name} is {fields[name]}; {low} to {high} are possible")

    bounds("n_seq_max", 1, model.lib.max_sequences)
    bounds("n_batch", 1, 1 << 24)
    bounds("n_ubatch", 1, 1 << 24)
    bounds("n_threads", 1, _MAX_THREADS)
    bounds("n_threads_batch", 1, _MAX_THREADS)
    bounds("n_rs_seq", 0, 1 << 16)
    bounds("n_outputs_max", 0, 1 << 24)
    bounds("n_ctx", 0, (1 << 31) - 1)
    n_seq, n_ctx = fields["n_seq_max"], fields["n_ctx"] or model.n_ctx_train
    # Without kv_unified n_ctx is shared out among the sequences.
    longest = model.n_ctx_train * (1 if fields["kv_unified"] else n_seq)
    if n_ctx < 1 or (n_ctx > longest and not beyond_training):
        raise InputError(
            f"n_ctx is {n_ctx}; {printable(model.path.name)} was trained for "
            f"{model.n_ctx_train} positions"
        )
    n_batch = min(fields["n_batch"], cells(n_ctx, 1 if fields["kv_unified"] else n_seq))
    if (fields["n_outputs_max"] or n_batch) < n_seq:
        raise InputError(f"n_outputs_max and n_batch must be at least n_seq_max, which is {n_seq}")
    # llama.cpp keeps the last n_rs_seq + 1 tokens of a sequence in one ubatch and asserts that
    # they fit.
    n_ubatch, snapshots = min(n_batch, fields["n_ubatch"]), fields["n_rs_seq"]
    if snapshots and (model.is_hybrid or model.is_recurrent) and snapshots + 1 >= n_ubatch:
        raise InputError(
            f"n_ubatch is {n_ubatch}, the least of it, n_batch and n_ctx; drafts of up to "
            f"{snapshots} tokens need more than {snapshots + 1} on {model.arch}: raise it or draft "
            "less"
        )
    if fields["type_v"] not in _FLOATS and fields["flash_attn_type"] == FLASH_ATTN["off"]:
        raise InputError("a quantised V cache needs flash attention: turn it on or choose f16")
    names = {number: name for name, number in CACHE_TYPES.items()}

    def refuse(what: str) -> NoReturn:
        raise InputError(f"{printable(model.path.name)} ({model.arch}) {what}")

    hparams.check_caches(
        model.header,
        names[fields["type_k"]],
        names[fields["type_v"]],
        [name for name in names.values() if CACHE_TYPES[name] not in _FLOATS],
        refuse,
    )


def cells(n_ctx: int, n_seq: int = 1) -> int:
    """Return the positions llama.cpp makes room for: a multiple of 256 for each sequence.

    Asked for fewer it grants as many, but would cut n_batch to what it was asked for.
    """
    return -(-n_ctx // (_CELLS * n_seq)) * _CELLS * n_seq


def check_mtp(model: Model, n_rs_seq: int, target: Model | None) -> None:
    """Refuse an MTP context on ``model`` that cannot work; raises ModelError, InputError."""
    name = printable(model.path.name)
    obstacle = model.mtp_obstacle()
    if obstacle is not None:
        raise ModelError(f"{name} ({model.arch}) cannot draft with MTP: {obstacle}")
    if n_rs_seq:
        raise InputError("an MTP context keeps no snapshots: n_rs_seq must be 0")
    if target is None:
        raise InputError("an MTP context needs the target's context as `other`")
    if target is model:
        return
    theirs = printable(target.path.name)
    known = arch.KNOWN.get(model.header.arch)
    # With another memory than the one it was made for, libllama may crash.
    wanted = known.target or model.header.arch if known is not None else target.header.arch
    if target.header.arch != wanted:
        raise ModelError(f"{name} drafts for {wanted} models only; {theirs} is {target.arch}")
    if known is not None and known.target:

        def refuse(what: str) -> NoReturn:
            raise ModelError(f"{name} does not fit the target {theirs}: {what}")

        hparams.check_shared(model.header, target.header, refuse)
    for what, ours, other in (
        ("hidden rows", model.n_embd_out, target.n_embd_out),
        ("a vocabulary", model.n_vocab, target.n_vocab),
    ):
        if ours != other:
            raise ModelError(f"{name} has {what} of {ours}, the target {theirs} of {other}")


def check_target(model: Model) -> None:
    """Refuse a target's context on a file that holds a head only; raises ModelError."""
    obstacle = model.trunk_obstacle()
    if obstacle is not None:
        raise ModelError(f"{printable(model.path.name)} ({model.arch}) cannot generate: {obstacle}")


def choice(name: str, value: str, allowed: Mapping[str, int]) -> int:
    """Return ``allowed[value]``; raises InputError naming what is allowed."""
    if value not in allowed:
        raise InputError(f"{name} is {printable(value)}; use one of {', '.join(allowed)}")
    return allowed[value]


def default_threads() -> int:
    """Return the number of physical cores, as llama.cpp counts them by default."""
    siblings = set()
    for file in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings"):
        try:
            siblings.add(file.read_text())
        except OSError:
            continue
    if siblings:
        return min(len(siblings), _MAX_THREADS)
    logical = os.cpu_count() or 4
    return min(logical if logical <= 4 else logical // 2, _MAX_THREADS)
