"""ctypes structures built from the ABI manifest, and the two checks of their layout.

The manifest is written at build time by a C program compiled against the very headers. A structure
is laid out as the manifest says; known names get their C type here, unknown ones are kept as opaque
bytes, so that a llama.cpp with more fields works unchanged.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mtpstats.errors import AbiMismatch

Layout = Mapping[str, Any]  # {"size": int, "fields": {name: [offset, size]}}

_PTR, _I32, _U32, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float
_BOOL, _SIZE = ctypes.c_bool, ctypes.c_size_t

# The C type of every field the binding knows. A pointer is never followed through ctypes.
FIELD_TYPES: dict[str, dict[str, type]] = {
    "llama_model_params": {
        "devices": _PTR, "tensor_buft_overrides": _PTR, "n_gpu_layers": _I32, "split_mode": _I32,
        "load_mode": _I32, "lazy_mode": _I32, "main_gpu": _I32, "tensor_split": _PTR,
        "progress_callback": _PTR, "progress_callback_user_data": _PTR, "kv_overrides": _PTR,
        "vocab_only": _BOOL, "use_mmap": _BOOL, "use_direct_io": _BOOL, "use_mlock": _BOOL,
        "check_tensors": _BOOL, "use_extra_bufts": _BOOL, "no_host": _BOOL, "no_alloc": _BOOL,
        "load_mtp": _BOOL,
    },
    "llama_context_params": {
        "n_ctx": _U32, "n_batch": _U32, "n_ubatch": _U32, "n_seq_max": _U32, "n_rs_seq": _U32,
        "n_outputs_max": _U32, "n_outputs_max_per_seq": _U32, "n_threads": _I32,
        "n_threads_batch": _I32, "ctx_type": _I32, "rope_scaling_type": _I32, "pooling_type": _I32,
        "attention_type": _I32, "flash_attn_type": _I32, "rope_freq_base": _F32,
        "rope_freq_scale": _F32, "yarn_ext_factor": _F32, "yarn_attn_factor": _F32,
        "yarn_beta_fast": _F32, "yarn_beta_slow": _F32, "yarn_orig_ctx": _U32,
        "defrag_thold": _F32, "cb_eval": _PTR, "cb_eval_user_data": _PTR, "type_k": _I32,
        "type_v": _I32, "abort_callback": _PTR, "abort_callback_data": _PTR, "embeddings": _BOOL,
        "offload_kqv": _BOOL, "no_perf": _BOOL, "op_offload": _BOOL, "swa_full": _BOOL,
        "kv_unified": _BOOL, "samplers": _PTR, "n_samplers": _SIZE, "ctx_other": _PTR,
    },
    "llama_batch": {
        "n_tokens": _I32, "token": _PTR, "embd": _PTR, "pos": _PTR, "n_seq_id": _PTR,
        "seq_id": _PTR, "logits": _PTR,
    },
    "llama_model_tensor_buft_override": {"pattern": _PTR, "buft": _PTR},
}  # fmt: skip

# What the binding cannot work without; other known fields are set only where they exist.
REQUIRED: dict[str, frozenset[str]] = {
    "llama_model_params": frozenset(
        {"devices", "n_gpu_layers", "progress_callback", "progress_callback_user_data",
         "vocab_only", "load_mtp"}
    ),
    "llama_context_params": frozenset(
        {"n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_threads",
         "n_threads_batch", "ctx_type", "flash_attn_type", "type_k", "type_v", "abort_callback",
         "abort_callback_data", "embeddings", "kv_unified", "ctx_other"}
    ),
    "llama_batch": frozenset(FIELD_TYPES["llama_batch"]),
    "llama_model_tensor_buft_override": frozenset({"pattern", "buft"}),
}  # fmt: skip


def _is(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(one) and value == one for one in allowed)


def _count(value: Any) -> bool:
    return 0 < int(value) <= 512


_NULL, _OFF, _ON = _is(None), _is(False), _is(True)
# What *_default_params must return where a field exists; a wrong offset reads something else.
# Booleans are held to 0 or 1, enumerations and counts not listed here to a small number.
DEFAULTS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "llama_model_params": {
        "devices": _NULL, "tensor_buft_overrides": _NULL, "n_gpu_layers": _is(-1, 0, 99, 999),
        "split_mode": _is(1), "main_gpu": _is(0), "tensor_split": _NULL,
        "progress_callback": _NULL, "progress_callback_user_data": _NULL, "kv_overrides": _NULL,
        "vocab_only": _OFF, "use_mmap": _ON, "use_mlock": _OFF, "check_tensors": _OFF,
        "use_extra_bufts": _ON, "no_host": _OFF, "no_alloc": _OFF, "load_mtp": _OFF,
    },
    "llama_context_params": {
        "n_ctx": _is(512), "n_batch": _is(2048), "n_ubatch": _is(512), "n_seq_max": _is(1),
        "n_rs_seq": _is(0), "n_outputs_max": _is(0), "n_threads": _count,
        "n_threads_batch": _count, "ctx_type": _is(0), "rope_scaling_type": _is(-1),
        "pooling_type": _is(-1), "attention_type": _is(-1), "flash_attn_type": _is(-1, 0),
        "rope_freq_base": _is(0.0), "rope_freq_scale": _is(0.0), "yarn_ext_factor": _is(-1.0),
        "yarn_orig_ctx": _is(0), "defrag_thold": _is(-1.0), "cb_eval": _NULL,
        "cb_eval_user_data": _NULL, "type_k": _is(1), "type_v": _is(1), "abort_callback": _NULL,
        "abort_callback_data": _NULL, "embeddings": _OFF, "offload_kqv": _ON, "op_offload": _ON,
        "swa_full": _ON, "kv_unified": _OFF, "samplers": _NULL, "n_samplers": _is(0),
        "ctx_other": _NULL,
    },
}  # fmt: skip
_SMALL = 1 << 20

# The values of enumerations that the binding passes and reads.
CONSTANTS: dict[str, int] = {
    "LLAMA_CONTEXT_TYPE_DEFAULT": 0, "LLAMA_CONTEXT_TYPE_MTP": 1, "LLAMA_VOCAB_TYPE_NONE": 0,
    "LLAMA_FLASH_ATTN_TYPE_AUTO": -1, "LLAMA_FLASH_ATTN_TYPE_DISABLED": 0,
    "LLAMA_FLASH_ATTN_TYPE_ENABLED": 1,
    "GGML_TYPE_F32": 0, "GGML_TYPE_F16": 1, "GGML_TYPE_BF16": 30, "GGML_TYPE_Q8_0": 8,
    "GGML_TYPE_Q4_0": 2, "GGML_TYPE_Q4_1": 3, "GGML_TYPE_IQ4_NL": 20, "GGML_TYPE_Q5_0": 6,
    "GGML_TYPE_Q5_1": 7,
    "GGML_LOG_LEVEL_NONE": 0, "GGML_LOG_LEVEL_DEBUG": 1, "GGML_LOG_LEVEL_INFO": 2,
    "GGML_LOG_LEVEL_WARN": 3, "GGML_LOG_LEVEL_ERROR": 4, "GGML_LOG_LEVEL_CONT": 5,
    "GGML_BACKEND_DEVICE_TYPE_CPU": 0, "GGML_BACKEND_DEVICE_TYPE_GPU": 1,
    "GGML_BACKEND_DEVICE_TYPE_IGPU": 2, "GGML_BACKEND_DEVICE_TYPE_ACCEL": 3,
    "GGML_BACKEND_DEVICE_TYPE_META": 4,
}  # fmt: skip

# Building the same source again would not help.
OTHER_SOURCE = "mtpstats cannot use this llama.cpp; ./build_llama.sh builds one that it can"


def _c_type(known: type | None, size: int) -> Any:
    if known is not None:
        return known
    for unit in (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint16):
        if size % ctypes.sizeof(unit) == 0:
            return unit if size == ctypes.sizeof(unit) else unit * (size // ctypes.sizeof(unit))
    return ctypes.c_uint8 * size


def check_layout(name: str, layout: Layout, where: str) -> None:
    """Refuse a layout that no C compiler could have made, naming the field that does not fit.

    Fields come in declaration order, so the rules of C give each offset from the fields before it:
    one altered number cannot go unseen. Raises AbiMismatch.
    """
    fields: Mapping[str, list[int]] = layout["fields"]
    known = FIELD_TYPES[name]
    end, widest = 0, 1
    for field, (offset, size) in fields.items():
        if size <= 0 or offset < 0:
            raise _mismatch(where, name, field, f"has size {size} and offset {offset}")
        c_type = _c_type(known.get(field), size)
        if ctypes.sizeof(c_type) != size:
            expected = ctypes.sizeof(c_type)
            raise _mismatch(where, name, field, f"has size {size}, its C type has {expected}")
        align = ctypes.alignment(c_type)
        widest = max(widest, align)
        place = -(-end // align) * align
        if offset != place:
            raise _mismatch(where, name, field, f"lies at {offset}, by the rules of C at {place}")
        end = place + size
    total = -(-end // widest) * widest
    if layout["size"] != total:
        raise _mismatch(where, name, "(size)", f"is {layout['size']}, its fields make {total}")
    missing = sorted(REQUIRED[name] - set(fields))
    if missing:
        raise AbiMismatch(f"{where}: {name}.{missing[0]} is needed and missing; {OTHER_SOURCE}")


def build(name: str, layout: Layout, where: str) -> type[ctypes.Structure]:
    """Return the ctypes structure ``name`` for a checked ``layout``; raises AbiMismatch."""
    check_layout(name, layout, where)
    known = FIELD_TYPES[name]
    fields = [(field, _c_type(known.get(field), size)) for field, (_, size) in
              layout["fields"].items()]  # fmt: skip
    made = type(name, (ctypes.Structure,), {"_fields_": fields})
    for field, (offset, size) in layout["fields"].items():
        member = getattr(made, field)
        if (member.offset, member.size) != (offset, size):
            raise _mismatch(where, name, field, f"is at {member.offset} in ctypes, not at {offset}")
    return made


def check_defaults(
    name: str, made: type[ctypes.Structure], layout: Layout, function: Any, where: str
) -> None:
    """Call ``*_default_params`` and compare what it writes with the layout; raises AbiMismatch.

    ``function`` is the raw symbol. Where the calling convention passes the result's address as a
    hidden first argument (x86-64) the bytes written are seen: the function fills two buffers that
    held different bytes, longer than the structure. Elsewhere only the values are checked.
    """
    size = ctypes.sizeof(made)
    if _hidden_pointer_is_first_argument() and size > 16:
        written = _bytes_written(function, size)
        for field, (offset, length) in layout["fields"].items():
            if not all(written[offset : offset + length]):
                raise _mismatch(where, name, field, "is not written by the library")
        if any(written[size:]):
            raise _mismatch(where, name, "(size)", "is smaller than what the library writes")
    function.argtypes, function.restype = [], made
    values = function()
    raw = bytes(values)
    for field, (offset, _) in layout["fields"].items():
        c_type = FIELD_TYPES[name].get(field)
        if c_type is None:
            continue
        value = getattr(values, field)
        expected = DEFAULTS[name].get(field)
        if c_type is ctypes.c_bool and raw[offset] > 1:
            raise _mismatch(where, name, field, f"is a bool and defaults to {raw[offset]}")
        if expected is not None and not expected(value):
            raise _mismatch(where, name, field, f"defaults to {value!r}, which it never does")
        if expected is None and isinstance(value, int) and abs(value) > _SMALL:
            raise _mismatch(where, name, field, f"defaults to {value}, which makes no sense")


def check_constants(enums: Mapping[str, Any], where: str) -> None:
    """Refuse a llama.cpp that gives a constant another value; raises AbiMismatch."""
    for name, value in CONSTANTS.items():
        # One it lacks is never met.
        found = enums.get(name, value)
        if found != value:
            raise AbiMismatch(f"{where}: {name} is {found!r}, not {value}; {OTHER_SOURCE}")


def _hidden_pointer_is_first_argument() -> bool:
    # System V and Windows both do this on x86-64 for results over 16 bytes; AArch64 uses x8,
    # which no argument list reaches.
    return platform.machine().lower() in ("x86_64", "amd64") and sys.maxsize > 2**32


def _bytes_written(function: Any, size: int) -> list[bool]:
    length = size + 256
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
    seen = []
    for fill in (0x5A, 0xA5):
        buffer = (ctypes.c_ubyte * length)()
        ctypes.memset(buffer, fill, length)
        function(ctypes.addressof(buffer))
        seen.append(bytes(buffer))
    return [a == b for a, b in zip(*seen, strict=True)]


def _mismatch(where: str, struct: str, field: str, what: str) -> AbiMismatch:
    return AbiMismatch(f"{where}: {struct}.{field} {what}; rebuild libllama with ./build_llama.sh")
