"""Tiny random-weight GGUF models with MTP blocks, made in seconds; nothing is committed.

``make(path, arch, **options)`` writes the metadata, lets llama.cpp itself say which tensors that
needs (``llama_model_init_from_user`` in a child process, since a wrong key may abort), and fills
them with seeded noise. The blocks are near the identity, so that the head agrees with the target
often, but not always: ``eh_proj`` is [I, noise] and what the branches add to the residual stream
is scaled by ``residual``.

The metadata of each architecture is in ``tinyarchs``.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tinyarchs import (
    KEYS,
    LEFT_OUT,
    Options,
    common,
    deepseek4_nextn_shapes,
    gemma4_assistant_shapes,
)

END = "<|end|>"
PAIRS = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt"

# Tensors llama.cpp can do without; the files they come from do not have them either.
_OPTIONAL = re.compile(
    r"\.(scale|input_scale)$|nextn\.(embed_tokens|shared_head_head)\."
    r"|attn_(q|k|v|qkv|output)\.bias$|ffn_\w+\.bias$"
)
_BRANCH_OUTPUT = re.compile(r"(attn_output(_b)?|ffn_down(_exps|_shexp)?|ssm_out)\.weight$")
_NORM_OF_STREAMS = re.compile(r"hc_\w*norm|nextn\.hnorm")
# Kept in F32 by every converter: ggml has no F16 kernel for some, the others are tiny.
_ALWAYS_F32 = re.compile(r"ssm_(conv1d|a|d|norm)|ffn_gate_inp|hc_|_ape|indexer")


def make(path: str | os.PathLike[str], arch: str, **options: Any) -> Path:
    """Write a model of ``arch`` to ``path``; the same arguments give the same bytes."""
    path = Path(path)
    o = replace(Options(), **options)
    if arch == "gemma4-assistant":
        shapes = gemma4_assistant_shapes(o)
    else:
        keys = path.with_suffix(".keys.gguf")
        _write(keys, arch, o, {})
        shapes = _shapes_in_child(keys)
        keys.unlink()
    if arch == "mimo2":
        shapes = _fused_qkv(shapes)
    if arch == "deepseek4":
        # Without weights llama.cpp takes the NextN block for one of the trunk.
        shapes |= deepseek4_nextn_shapes(o)
    tensors = {}
    for name, shape in shapes.items():
        left_out = (LEFT_OUT.get(arch), o.without)
        if _OPTIONAL.search(name) or any(one and re.search(one, name) for one in left_out):
            continue
        if not o.only or re.search(o.only, name):
            tensors[name] = _weights(name, shape, o)
    if arch == "gemma4-assistant":
        _agree_with_gemma4(tensors, o)
    _write(path, arch, o, tensors)
    return path


def _weights(name: str, shape: list[int], o: Options) -> np.ndarray:
    # A block's own mixer of the streams is the trunk's, so that the two agree.
    name = re.sub(r"blk\.\d+\.nextn\.hc_head_", "output_hc_", name)
    # By name, not by order: leaving one tensor out leaves the others alone.
    rng = np.random.default_rng([o.seed, *name.encode()])
    rows = tuple(reversed(shape))  # GGUF names the fastest dimension first
    noise = rng.standard_normal(rows, dtype=np.float32)
    fan_in = shape[0]
    if name == o.nan_in:
        value = np.full(rows, np.nan, dtype=np.float32)
    elif "ssm_a" in name:
        value = -np.exp(noise)
    elif name.endswith("bias"):
        value = np.zeros(rows, dtype=np.float32)
    elif len(rows) == 1 or _NORM_OF_STREAMS.search(name):
        value = 1 + noise / 20
    elif name == "token_embd.weight":
        value = noise
    elif name == "output.weight":
        value = noise * (o.sharpness / fan_in**0.5)
    elif "nextn.eh_proj" in name:
        value = noise * (o.noise / fan_in**0.5)
        value[:, : rows[0]] += np.eye(rows[0], dtype=np.float32)
    elif _BRANCH_OUTPUT.search(name):
        value = noise * (o.residual / fan_in**0.5)
    else:
        value = noise / fan_in**0.5
    keep = o.f32 or len(rows) == 1 or _ALWAYS_F32.search(name)
    return np.ascontiguousarray(value, dtype=np.float32 if keep else np.float16)


def _fused_qkv(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Query, key and value matrices as one: llama.cpp lists both forms as the separate one."""
    fused: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        joint = re.sub(r"attn_[qkv]\.weight$", "attn_qkv.weight", name)
        if joint in fused:
            shape = [shape[0], fused[joint][1] + shape[1]]
        fused[joint] = shape
    return fused


def _agree_with_gemma4(tensors: dict[str, np.ndarray], o: Options) -> None:
    """Give the assistant its target's output matrix, to be met by the token's embedding."""
    n = o.n_embd
    output = _weights("output.weight", [n, o.n_vocab], replace(o, f32=True))
    for name, rows, block in (
        ("token_embd.weight", slice(None), output),
        ("nextn.pre_projection.weight", slice(0, n), np.eye(n)),
        ("nextn.post_projection.weight", slice(None), np.eye(n)),
    ):
        tensors[name] *= o.noise
        tensors[name][rows, :n] += block.astype(tensors[name].dtype)


def _write(path: Path, arch: str, o: Options, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name(f"tiny-{arch}")
    writer.add_file_type(0 if o.f32 else 1)
    for key, value in {**common(o), **KEYS[arch](o)}.items():
        _add(writer, f"{arch}.{key}", value)
    if o.spm:
        _add_pieces(writer, o.n_vocab)
    elif o.tokenizer:
        _add_tokenizer(writer, o.n_vocab, o.eog)
    else:
        writer.add_tokenizer_model("none")
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _byte_letters() -> list[str]:
    # GPT-2's letters for the 256 bytes: printable Latin-1 as itself, the rest from U+0100 on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _add_tokenizer(writer: Any, n_vocab: int, eog: int) -> None:
    merges = [f"{a} {b}" for a, b in PAIRS.split()]
    tokens = [*_byte_letters(), END, *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"Ġw{i}" for i in range(len(tokens), n_vocab)]
    assert len(tokens) == n_vocab, f"n_vocab must be at least {len(tokens)}"
    types = [gguf.TokenType.NORMAL] * n_vocab
    types[256] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(eog)
    writer.add_add_bos_token(False)


def _add_pieces(writer: Any, n_vocab: int) -> None:
    kinds = gguf.TokenType
    special = {"<unk>": kinds.UNKNOWN, "<s>": kinds.CONTROL, "</s>": kinds.CONTROL}
    special |= {f"<0x{byte:02X}>": kinds.BYTE for byte in range(256)}
    words = ["\u2581", *map(chr, range(ord("a"), ord("z") + 1)), *PAIRS.split()]
    tokens = [*special, *words]
    tokens += [f"\u2581w{i}" for i in range(len(tokens), n_vocab)]
    assert len(tokens) == n_vocab, f"n_vocab must be at least {len(special) + len(words)}"
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(n_vocab)])
    writer.add_token_types([special.get(token, kinds.NORMAL) for token in tokens])
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _shapes_in_child(keys: Path) -> dict[str, list[int]]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, __file__, str(keys)], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, f"{keys.name}: {done.stderr[-2000:]}"
    return json.loads(done.stdout)


def _shapes(keys: str) -> dict[str, list[int]]:
    """Ask llama.cpp for the tensors of a model that has metadata only."""
    from mtpstats.llama import load

    lib = load()
    c = lib._cdll
    init = c["gguf_init_from_file"]

    class Params(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    init.argtypes, init.restype = [ctypes.c_char_p, Params], ctypes.c_void_p
    get_name, n_elements = c["ggml_get_name"], c["ggml_nelements"]
    get_name.argtypes, get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    n_elements.argtypes, n_elements.restype = [ctypes.c_void_p], ctypes.c_int64
    found: dict[str, list[int]] = {}
    callback_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)

    def record(tensor: int, _user_data: Any) -> None:
        # struct ggml_tensor { enum ggml_type type; void * buffer; int64_t ne[4]; ...
        extents = list((ctypes.c_int64 * 4).from_address(tensor + 16))
        assert int(np.prod(extents)) == n_elements(tensor)
        while len(extents) > 1 and extents[-1] == 1:
            extents.pop()
        found[get_name(tensor).decode()] = extents

    callback = callback_type(record)
    user = c["llama_model_init_from_user"]
    user.argtypes = [
        ctypes.c_void_p,
        callback_type,
        ctypes.c_void_p,
        lib.structs["llama_model_params"],
    ]
    user.restype = ctypes.c_void_p
    params = lib.fn.llama_model_default_params()
    params.load_mtp = True
    params.n_gpu_layers = 0
    model = user(init(os.fsencode(keys), Params(True, None)), callback, None, params)
    assert model, lib.log.since(0, 10)
    return found


if __name__ == "__main__":
    print(json.dumps(_shapes(sys.argv[1])))
