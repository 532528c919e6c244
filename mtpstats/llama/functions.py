"""One line per C function the binding calls: name, argument types, result type, checker.

A checker is attached as ``errcheck``: it turns a refusal into an exception with llama.cpp's own
last log lines, so that call sites carry no ``if rc``. Names that live in ``llama-ext.h`` have no C
linkage; the manifest gives their mangled symbols.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from mtpstats.errors import AbiMismatch, ContextFull, DecodeError, Interrupted, LlamaError
from mtpstats.llama.log import CALLBACK, Log
from mtpstats.llama.structs import OTHER_SOURCE

_P, _I, _U, _S, _B = c_void_p, c_int32, c_uint32, c_char_p, c_bool
_SIZES = ctypes.POINTER(c_size_t)
_BATCH, _MODEL_PARAMS, _CONTEXT_PARAMS = "llama_batch", "llama_model_params", "llama_context_params"

# bool (*)(float progress, void * user_data): false stops the loading of a model
PROGRESS = ctypes.CFUNCTYPE(c_bool, c_float, c_void_p)

# ggml_backend_reg_t (*)(const char * endpoint): what the RPC backend is asked for by name
ADD_SERVER = ctypes.CFUNCTYPE(c_void_p, c_char_p)

# void (*)(const char * error_message): hears of a failed assertion before the process is aborted
ABORT = ctypes.CFUNCTYPE(None, c_char_p)

# (name, argument types, result type, checker). A string stands for a structure of the manifest.
_REQUIRED: list[tuple[str, list[Any], Any, str | None]] = [
    # library
    ("llama_backend_init", [], None, None),
    # void llama_log_set(ggml_log_callback, void * user_data)
    ("llama_log_set", [CALLBACK, _P], None, None),
    ("llama_max_parallel_sequences", [], c_size_t, None),
    ("llama_max_devices", [], c_size_t, None),
    ("llama_supports_rpc", [], _B, None),
    ("llama_supports_gpu_offload", [], _B, None),
    ("ggml_backend_dev_count", [], c_size_t, None),
    ("ggml_backend_dev_get", [c_size_t], _P, "null"),
    ("ggml_backend_dev_name", [_P], _S, None),
    ("ggml_backend_dev_description", [_P], _S, None),
    ("ggml_backend_dev_type", [_P], _I, None),
    # void ggml_backend_dev_memory(ggml_backend_dev_t, size_t * free, size_t * total)
    ("ggml_backend_dev_memory", [_P, _SIZES, _SIZES], None, None),
    ("ggml_backend_dev_backend_reg", [_P], _P, None),
    ("ggml_backend_reg_name", [_P], _S, None),
    ("ggml_backend_load_all_from_path", [_S], None, None),
    # model
    ("llama_model_default_params", [], _MODEL_PARAMS, None),
    ("llama_model_load_from_file", [_S, _MODEL_PARAMS], _P, "null"),
    ("llama_model_free", [_P], None, None),
    ("llama_model_get_vocab", [_P], _P, "null"),
    ("llama_model_n_ctx_train", [_P], _I, None),
    ("llama_model_n_embd", [_P], _I, None),
    ("llama_model_n_embd_out", [_P], _I, None),
    ("llama_model_n_layer", [_P], _I, None),
    ("llama_model_n_layer_nextn", [_P], _I, None),
    ("llama_model_n_params", [_P], c_uint64, None),
    ("llama_model_size", [_P], c_uint64, None),
    # int32_t llama_model_desc(const llama_model *, char * buf, size_t buf_size)
    ("llama_model_desc", [_P, _P, c_size_t], _I, None),
    ("llama_model_meta_count", [_P], _I, None),
    # int32_t llama_model_meta_val_str(const llama_model *, const char * key, char * buf, size_t)
    ("llama_model_meta_val_str", [_P, _S, _P, c_size_t], _I, None),
    # int32_t llama_model_meta_key_by_index(const llama_model *, int32_t i, char * buf, size_t)
    ("llama_model_meta_key_by_index", [_P, _I, _P, c_size_t], _I, None),
    ("llama_model_meta_val_str_by_index", [_P, _I, _P, c_size_t], _I, None),
    # const char * llama_model_chat_template(const llama_model *, const char * name or NULL)
    ("llama_model_chat_template", [_P, _S], _S, None),
    ("llama_model_has_encoder", [_P], _B, None),
    ("llama_model_is_recurrent", [_P], _B, None),
    ("llama_model_is_hybrid", [_P], _B, None),
    # vocabulary
    ("llama_vocab_type", [_P], _I, None),
    ("llama_vocab_n_tokens", [_P], _I, None),
    ("llama_vocab_is_eog", [_P, _I], _B, None),
    ("llama_vocab_bos", [_P], _I, None),
    ("llama_vocab_eos", [_P], _I, None),
    ("llama_vocab_get_add_bos", [_P], _B, None),
    ("llama_vocab_get_add_eos", [_P], _B, None),
    # int32_t llama_tokenize(const llama_vocab *, const char * text, int32_t text_len,
    #     llama_token * tokens, int32_t n_tokens_max, bool add_special, bool parse_special)
    ("llama_tokenize", [_P, _S, _I, _P, _I, _B, _B], _I, None),
    # int32_t llama_token_to_piece(const llama_vocab *, llama_token, char * buf, int32_t length,
    #     int32_t lstrip, bool special)
    ("llama_token_to_piece", [_P, _I, _P, _I, _I, _B], _I, None),
    # context
    ("llama_context_default_params", [], _CONTEXT_PARAMS, None),
    ("llama_init_from_model", [_P, _CONTEXT_PARAMS], _P, "null"),
    ("llama_free", [_P], None, None),
    ("llama_n_ctx", [_P], _U, None),
    ("llama_n_batch", [_P], _U, None),
    ("llama_n_ubatch", [_P], _U, None),
    ("llama_n_seq_max", [_P], _U, None),
    ("llama_synchronize", [_P], None, None),
    ("llama_decode", [_P, _BATCH], _I, "decode"),
    # float * llama_get_logits_ith(llama_context *, int32_t i)
    ("llama_get_logits_ith", [_P, _I], _P, None),  # NULL: Context, several times a step
    # void llama_set_abort_callback(llama_context *, ggml_abort_callback, void * user_data)
    ("llama_set_abort_callback", [_P, _P, _P], None, None),
    # memory
    ("llama_get_memory", [_P], _P, "null"),
    # void llama_memory_clear(llama_memory_t, bool data)
    ("llama_memory_clear", [_P, _B], None, None),
    # bool llama_memory_seq_rm(llama_memory_t, llama_seq_id, llama_pos p0, llama_pos p1)
    ("llama_memory_seq_rm", [_P, _I, _I, _I], _B, "removed"),
    # void llama_memory_seq_cp(llama_memory_t, llama_seq_id src, llama_seq_id dst, p0, p1)
    ("llama_memory_seq_cp", [_P, _I, _I, _I, _I], None, None),
    ("llama_memory_seq_pos_min", [_P, _I], _I, None),
    ("llama_memory_seq_pos_max", [_P, _I], _I, None),
    # llama-ext.h: no C linkage
    # void llama_set_embeddings_nextn(llama_context *, bool value, bool masked)
    ("llama_set_embeddings_nextn", [_P, _B, _B], None, None),
    ("llama_get_embeddings_nextn", [_P], _P, "row"),
    ("llama_get_embeddings_nextn_ith", [_P, _I], _P, None),
]  # fmt: skip

# Absent from some versions; calling one that is absent raises AbiMismatch.
_OPTIONAL: list[tuple[str, list[Any], Any, str | None]] = [
    ("llama_version", [], _S, None),
    # ggml_abort_callback_t ggml_set_abort_callback(ggml_abort_callback_t)
    ("ggml_set_abort_callback", [_P], _P, None),
    # devices other than llama.cpp's own choice
    ("ggml_backend_dev_buffer_type", [_P], _P, "null"),
    ("ggml_backend_buft_name", [_P], _S, None),
    ("ggml_backend_reg_by_name", [_S], _P, "null"),
    # void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t, const char * name)
    ("ggml_backend_reg_get_proc_address", [_P, _S], _P, "null"),
    ("ggml_backend_register", [_P], None, None),
    ("llama_ftype_name", [_I], _S, None),
    ("llama_model_ftype", [_P], _I, None),
    ("llama_n_ctx_seq", [_P], _U, None),
    ("llama_n_rs_seq", [_P], _U, None),
    ("llama_model_n_swa", [_P], _I, None),
    ("llama_get_ctx_other", [_P], _P, None),
    ("llama_set_nextn_layer_offset", [_P, _I], None, None),
]  # fmt: skip


class Functions:
    """The bound functions as attributes. ``has(name)`` tells whether an optional one exists."""

    def __init__(self, prefix: str) -> None:
        """Empty; ``bind`` fills it."""
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the loaded library has the function."""
        return name in self.__dict__

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Reached only for a function the library lacks."""
        raise AbiMismatch(f"libllama of {self._prefix} has no function {name}")


def bind(
    library: ctypes.CDLL,
    manifest: Mapping[str, Any],
    structs: Mapping[str, type[ctypes.Structure]],
    log: Log,
    where: str,
) -> Functions:
    """Resolve and type every function. Raises AbiMismatch naming the symbol that is missing."""
    functions = Functions(where)
    symbols: Mapping[str, str] = manifest.get("symbols", {})
    checkers = _checkers(log, {symbol: name for name, symbol in symbols.items()})
    for optional, table in ((False, _REQUIRED), (True, _OPTIONAL)):
        for name, arguments, result, checker in table:
            symbol = symbols.get(name, name)
            try:
                # A fresh object per binding: CDLL caches by name, and prototypes differ.
                function = library[symbol]
            except AttributeError:
                if optional:
                    continue
                raise AbiMismatch(
                    f"{where}: the library has no symbol {symbol} ({name}); {OTHER_SOURCE}"
                ) from None
            function.argtypes = [structs[a] if isinstance(a, str) else a for a in arguments]
            function.restype = structs[result] if isinstance(result, str) else result
            if checker is not None:
                function.errcheck = checkers[checker]
            setattr(functions, name, function)
    return functions


# llama.h documents these codes; each has its own meaning for the caller.
_DECODE_FATAL = {
    -2: "memory for the batch or its outputs could not be set up",
    -3: "the computation failed on the device",
}


def _checkers(log: Log, plain: Mapping[str, str]) -> dict[str, Callable[[Any, Any, Any], Any]]:
    mark = 0

    def name(function: Any) -> str:
        return plain.get(function.__name__, str(function.__name__))

    def detail() -> str:
        # Lines logged before the last failure were already told.
        nonlocal mark
        text, mark = log.since(mark), log.count
        return f": {text}" if text else ""

    def null(result: Any, function: Any, _arguments: Any) -> Any:
        if not result:
            raise LlamaError(f"{name(function)} returned NULL{detail()}")
        return result

    def row(result: Any, function: Any, arguments: Any) -> Any:
        if not result:
            raise LlamaError(f"{name(function)} has no row {arguments[1:]}{detail()}")
        return result

    def removed(result: Any, _function: Any, arguments: Any) -> Any:
        if not result:
            _, seq, p0, p1 = arguments
            raise LlamaError(
                f"the memory cannot remove positions {p0}..{p1} of sequence {seq}{detail()}"
            )
        return result

    def decode(result: int, _function: Any, _arguments: Any) -> int:
        if result == 0:
            return result
        if result == 1:
            raise ContextFull(f"no room in the context for the batch{detail()}", 1)
        if result == 2:
            interrupted = Interrupted("interrupted while decoding")
            interrupted.code = 2
            raise interrupted
        if result == -1:
            raise DecodeError(f"llama_decode found the batch invalid (-1){detail()}", -1)
        meaning = _DECODE_FATAL.get(result, "llama_decode failed")
        raise DecodeError(f"{meaning} (llama_decode returned {result}){detail()}", result)

    return {"null": null, "row": row, "removed": removed, "decode": decode}
