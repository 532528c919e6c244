"""Damaged and hostile GGUF files, made from sound ones; the same arguments make the same bytes.

``of(content)`` lists every mutation of a file by name: each metadata key and each field of each
tensor in turn, keys the file does not have, the header's counts, truncations, flipped bits and
spliced blocks. A mutation makes its bytes only when it is called, and lays the file out anew, so
that one wrong value stands alone in a file that is otherwise sound.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ggufparts import (
    ARRAY,
    BOOL,
    F32,
    SCALARS,
    STRING,
    File,
    Info,
    Key,
    key_of,
    parse,
    string,
)

# What a file may add and llama.cpp reads: key without the architecture, and values to try.
_COUNTS = (0, 1, 3, 1 << 31)
_REALS = (0.0, -1.0, float("nan"), 1e38)
ADDED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("vocab_size", "embedding_length_out", "embedding_length_per_layer_input"),
            *("leading_dense_block_count", "expert_count", "expert_used_count"),
            *("expert_shared_count", "expert_group_count", "expert_group_used_count"),
            *("expert_gating_func", "expert_feed_forward_length", "nextn_predict_layers"),
            *("expert_shared_feed_forward_length", "moe_every_n_layers", "moe_latent_size"),
            *("interleave_moe_layer_step", "full_attention_interval", "n_deepstack_layers"),
            *("pooling_type", "token_shift_count", "hash_layer_count", "decoder_block_count"),
            *("attention.key_length", "attention.value_length", "attention.key_length_mla"),
            *("attention.value_length_mla", "attention.key_length_swa", "attention.head_count_kv"),
            *("attention.value_length_swa", "attention.q_lora_rank", "attention.kv_lora_rank"),
            *("attention.sliding_window", "attention.sliding_window_pattern"),
            *("attention.shared_kv_layers", "attention.indexer.head_count"),
            *("attention.indexer.key_length", "attention.indexer.top_k"),
            *("attention.output_group_count", "attention.temperature_length"),
            *("rope.dimension_count", "rope.dimension_count_swa"),
            *("rope.scaling.original_context_length", "ssm.conv_kernel", "ssm.inner_size"),
            *("ssm.state_size", "ssm.time_step_rank", "ssm.group_count", "kda.head_dim"),
            *("hyper_connection.count", "hyper_connection.sinkhorn_iterations"),
        ),
        _COUNTS,
    ),
    **dict.fromkeys(
        (
            *("logit_scale", "residual_scale", "embedding_scale", "final_logit_softcapping"),
            *("attn_logit_softcapping", "router_logit_softcapping", "expert_weights_scale"),
            *("attention.max_alibi_bias", "attention.clamp_kqv", "attention.scale"),
            *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
            *("attention.group_norm_epsilon", "attention.temperature_scale"),
            *("rope.freq_base", "rope.freq_base_swa", "rope.scale_linear", "rope.scaling.factor"),
            *("rope.scaling.attn_factor", "rope.scaling.alpha", "rope.scaling.yarn_ext_factor"),
            *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast"),
            *("rope.scaling.yarn_beta_slow", "hyper_connection.epsilon"),
        ),
        _REALS,
    ),
    **dict.fromkeys(("attention.causal", "expert_weights_norm", "use_parallel_residual"), (True,)),
    "rope.scaling.type": ("none", "linear", "yarn", "longrope", "", "nonsense"),
    "rope.dimension_sections": ([0, 0, 0, 0], [1 << 30] * 4, [4, 4], [-1, -1, -1, -1], [1] * 64),
    "attention.head_count": ([0] * 3, [1, 2, 3], [1 << 31] * 600),
    "feed_forward_length": ([0] * 3, [1 << 31] * 600),
}
TOKENIZER_ADDED: dict[str, tuple[Any, ...]] = {
    **{
        f"tokenizer.ggml.{name}_token_id": (0, 511, 1 << 20, (1 << 32) - 1)
        for name in (
            *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask"),
            *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
        )
    },
    **{
        f"tokenizer.ggml.{name}": (True, False)
        for name in (
            *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix"),
            *("remove_extra_whitespaces", "normalizer.lowercase"),
        )
    },
    "tokenizer.ggml.suppress_tokens": ([-1, 1 << 30], []),
    "tokenizer.ggml.precompiled_charsmap": ([], [255] * 8),
    "tokenizer.ggml.token_type_count": (0, 1 << 31),
    "tokenizer.chat_template": ("", "{{ bad", "{% for %}" * 1000, "\0\x1b[2J\n"),
    "general.name": ("phi-3", "modern-bert", "\x1b[2J", ""),
    "general.file_type": (0, 1024, (1 << 32) - 1),
    "general.alignment": (0, 1, 3, 64, 1 << 31),
    "split.count": (0, 2, 65535),
    "split.no": (1,),
}
TOKENIZERS = ("gpt2", "llama", "bert", "t5", "rwkv", "plamo2", "test", "gemma4", "none",
              "no_vocab", "hybriddna", "whitespace", "")  # fmt: skip
PRE_TOKENIZERS = (
    *("default", "llama-bpe", "deepseek-llm", "deepseek-v3", "falcon", "gpt-2", "jais-2", "gemma4"),
    *("sarvam-moe", "whitespace", "command-r", "qwen2", "qwen35", "olmo", "chatglm-bpe", "glm4"),
    *("viking", "jais", "tekken", "bloom", "gpt-4o", "superbpe", "seed-coder", "kimi-k2", "afmoe"),
    *("minimax-m2", "", "nonsense"),
)
ARCHITECTURES = (
    *("llama", "qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2", "deepseek32", "mimo2"),
    *("deepseek4", "bailingmoe3", "cohere2moe", "step35", "hy_v3", "nemotron_h_moe", "gemma4"),
    *("gemma4-assistant", "glm-dsa", "clip", "bert", "mamba", "rwkv7", "t5", "", "nonsense"),
)
GGML_TYPES = (*range(43), 1 << 31, (1 << 32) - 1)


@dataclass(frozen=True)
class Mutation:
    """A changed file: ``name`` says what was done, calling it makes the bytes."""

    name: str
    make: Callable[[], bytes]

    def __call__(self) -> bytes:
        return self.make()


def _scalars(key: Key) -> Iterator[tuple[str, Key]]:
    """Other values of the same type."""
    fmt = SCALARS[key.kind]
    if key.kind == BOOL:
        values: Iterable[Any] = (0, 1, 2, 255)
    elif fmt in ("<f", "<d"):
        nan, inf = float("nan"), float("inf")
        values = (0.0, -0.0, -1.0, -1e-9, 1e-45, 1.0, 1e30, 3e38, nan, inf, -inf)
    else:
        v, bits = key.value, 8 * struct.calcsize(fmt)
        wanted = (0, 1, 2, 3, 7, 8, 16, 48, 64, 65, 1000, v - 2, v - 1, v + 1, v + 2, v // 2,
                  v * 2, v * 3, 1 << 16, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31,
                  (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)  # fmt: skip
        values = dict.fromkeys(w % (1 << bits) for w in wanted if w % (1 << bits) != v)
    for value in values:
        signed = fmt in ("<b", "<h", "<i", "<q")
        if signed and value >= 1 << (8 * struct.calcsize(fmt) - 1):
            value -= 1 << 8 * struct.calcsize(fmt)
        yield f"= {value}", replace(key, raw=struct.pack(fmt, value))


def _other_kinds(key: Key) -> Iterator[tuple[str, Key]]:
    """The same name with a value of another type."""
    value = key.value if key.kind not in (STRING, ARRAY) else 1
    number = int(value) if value == value and abs(value) < 1 << 62 else 0
    for kind, fmt in SCALARS.items():
        if kind != key.kind:
            size = 8 * struct.calcsize(fmt)
            shown = float(value) if fmt in ("<f", "<d") else number % (1 << (size - 1))
            yield f"of type {kind}", Key(key.name, kind, struct.pack(fmt, shown))
    if key.kind != STRING:
        yield "a string", Key(key.name, STRING, string(b"1"))
    if key.kind != ARRAY:
        if key.kind != STRING:
            for count in (0, 1, 3, 600):
                item = (key.raw,) * count
                yield f"an array of {count}", Key(key.name, ARRAY, b"", key.kind, item)
        yield "an array of strings", Key(key.name, ARRAY, b"", STRING, (string(b"1"),) * 3)
        yield "of no type", replace(key, kind=13)
        yield "an array of arrays", Key(key.name, ARRAY, b"", ARRAY, (b"\4" + bytes(11),))


def _strings(key: Key) -> Iterator[tuple[str, Key]]:
    text = key.raw[8:]
    values = [b"", b"\0", b"\xff\xfe", b"x" * 70000, b"\x1b[2J", text[:-1], text + b"s"]
    if key.name == b"tokenizer.ggml.model":
        values += [name.encode() for name in TOKENIZERS]
    if key.name == b"tokenizer.ggml.pre":
        values += [name.encode() for name in PRE_TOKENIZERS]
    if key.name == b"general.architecture":
        values += [name.encode() for name in ARCHITECTURES]
    for value in dict.fromkeys(values):
        shown = value[:20].decode("latin-1")
        yield f"= {shown!r}", replace(key, raw=string(value))
    for length in (len(text) + 1, 1 << 31, 1 << 63, (1 << 64) - 1):
        yield f"of length {length}", replace(key, raw=struct.pack("<Q", length) + text)


def _arrays(key: Key) -> Iterator[tuple[str, Key]]:
    items = key.items
    for name, changed in (
        ("empty", ()),
        ("one less", items[:-1]),
        ("one more", (*items, *items[-1:])),
        ("half", items[: len(items) // 2]),
        ("twice", items * 2),
        ("the first only", items[:1]),
        ("reversed", items[::-1]),
        ("all as the first", items[:1] * len(items)),
        ("600 of the first", items[:1] * 600),
    ):
        if changed != items:
            yield name, replace(key, items=changed)
    for count in (len(items) + 1, len(items) - 1, 1 << 31, 1 << 61, (1 << 64) - 1):
        yield f"{count} told", replace(key, count=count % (1 << 64))
    for element in (*SCALARS, STRING, ARRAY, 13, (1 << 32) - 1):
        if element != key.element:
            yield f"elements of type {element}", replace(key, element=element)
    if key.element == STRING:
        yield from _string_items(key)
        return
    fmt = SCALARS[key.element]
    size = struct.calcsize(fmt)
    for name, raw in (("zero", bytes(size)), ("all bits", b"\xff" * size),
                      ("huge", b"\xff" * (size - 1) + b"\x7f"),
                      ("one", struct.pack(fmt, 1)), ("2", struct.pack(fmt, 2)),
                      ("6", struct.pack(fmt, 6))):  # fmt: skip
        yield f"all {name}", replace(key, items=(raw,) * len(items))
        for at in sorted({0, len(items) // 2, len(items) - 1}):
            if 0 <= at < len(items):
                yield (
                    f"[{at}] {name}",
                    replace(key, items=(*items[:at], raw, *items[at + 1 :])),
                )


def _string_items(key: Key) -> Iterator[tuple[str, Key]]:
    items = key.items
    for at in sorted({0, 10, len(items) // 2, len(items) - 1}):
        if not 0 <= at < len(items):
            continue
        for text in (b"", b"\xff", b" ", b"a", b"<0x0A>", b"[EMPTY_0]", b"x" * 100000,
                     b"\xe2\x96\x81", b"<|endoftext|>", b"<|end|>", b"a b c", b"\0"):  # fmt: skip
            shown = text[:12].decode("latin-1")
            changed = (*items[:at], string(text), *items[at + 1 :])
            yield f"[{at}] = {shown!r}", replace(key, items=changed)
    bytes_left_out = tuple(
        string(b"w%d" % at) if raw[8:11] == b"<0x" else raw for at, raw in enumerate(items)
    )
    if bytes_left_out != items:
        yield "without byte tokens", replace(key, items=bytes_left_out)
    yield "only long ones", replace(
        key, items=tuple(string(b"long%d" % at) for at in range(len(items)))
    )  # fmt: skip


def _of_key(key: Key) -> Iterator[tuple[str, Key]]:
    if key.kind == ARRAY:
        yield from _arrays(key)
    elif key.kind == STRING:
        yield from _strings(key)
    else:
        yield from _scalars(key)
    yield from _other_kinds(key)


def _resized(info: Info, shape: tuple[int, ...], kind: int) -> Info:
    """The tensor in another shape or type, with as much data as that takes, if it is little."""
    from mtpstats.llama.gguf import TYPE_SIZES

    per_block, size = TYPE_SIZES.get(kind, (1, 4))
    wanted = math.prod(shape) // per_block * size
    data = info.data
    if 0 <= wanted <= 1 << 23:
        data = (data * (wanted // max(len(data), 1) + 1))[:wanted]
    return replace(info, shape=shape, kind=kind, data=data)


def _of_info(info: Info) -> Iterator[tuple[str, Info]]:
    shape = info.shape
    shapes: dict[str, tuple[int, ...]] = {
        "reversed": shape[::-1],
        "flat": (math.prod(shape),),
        "no dimensions": (),
        "one more dimension": (*shape, 1),
        "4 dimensions": (*shape, 2, 2, 2, 2)[:4],
        "5 dimensions": (*shape, 1, 1, 1, 1, 1)[:5],
        "halved in front": (shape[0] // 2, *shape[1:]),
        "one in front": (1, *shape),
    }
    for axis, extent in enumerate(shape):
        for value in (0, 1, extent - 1, extent + 1, extent * 2, extent // 2, 1 << 20, 1 << 40,
                      (1 << 63) - 1, (1 << 64) - 1):  # fmt: skip
            shapes[f"dimension {axis} = {value}"] = (*shape[:axis], value, *shape[axis + 1 :])
    for name, changed in shapes.items():
        if changed != shape:
            yield name, _resized(info, changed, info.kind)
    for kind in GGML_TYPES:
        if kind != info.kind:
            yield f"type {kind}", _resized(info, shape, kind)
    for n_dims in (0, len(shape) - 1, len(shape) + 1, 5, -1):
        yield f"{n_dims} dimensions told", replace(info, n_dims=n_dims)
    for offset in (1, 32, 1 << 40, (1 << 64) - 32):
        yield f"offset {offset}", replace(info, offset=offset)
    for renamed in (b"", info.name + b"s", b"x" * 63, b"x" * 64, b"\xff\0\n", b"blk.600.x.weight"):
        yield f"renamed {renamed[:20]!r}", replace(info, name=renamed)
    for name, value in (("NaN", float("nan")), ("inf", float("inf")), ("0", 0.0), ("-1", -1.0)):
        fmt = {0: "<f", 1: "<e"}.get(info.kind)
        if fmt:
            raw = struct.pack(fmt, value)
            yield f"all {name}", replace(info, data=raw * (len(info.data) // len(raw)))
    yield "all bits set", replace(info, data=b"\xff" * len(info.data))


Change = Callable[[File], File]


def of(content: bytes, seed: int = 0) -> list[Mutation]:
    """Every mutation of a sound file; those that are drawn, from ``seed``."""
    file = parse(content)
    single = [
        Mutation(name, lambda change=change: change(file).encode())
        for name, change in _changes(file)
    ]
    return [*single, *_blind(content, _header_size(file), seed)]


def pairs(content: bytes, count: int, seed: int = 0) -> list[Mutation]:
    """``count`` files with two structured changes each, drawn from ``seed``."""
    file, rng = parse(content), random.Random(seed)
    changes = list(_changes(file))
    drawn = [rng.sample(changes, 2) for _ in range(count)]
    return [
        Mutation(f"{a}; {b}", lambda one=one, two=two: two(one(file)).encode())
        for (a, one), (b, two) in drawn
    ]


def _header_size(file: File) -> int:
    data = sum(len(info.data) + -len(info.data) % file.alignment for info in file.infos)
    return len(file.encode()) - data


def _changes(file: File) -> Iterator[tuple[str, Change]]:
    n_keys, n_infos = len(file.keys), len(file.infos)
    for fields in (
        {"magic": b"GGML"},
        *({"version": version} for version in (0, 1, 2, 4, 0x03000000)),
        *({"n_keys": n} for n in (0, n_keys - 1, n_keys + 1, 1 << 40, 1 << 63)),
        *({"n_infos": n} for n in (0, n_infos - 1, n_infos + 1, 1 << 63)),
    ):
        shown = ", ".join(f"{name} = {value!r}" for name, value in fields.items())
        yield f"header: {shown}", lambda f, fields=fields: replace(f, **fields)
    yield "no tensors", lambda f: replace(f, infos=())
    yield "tensors reversed", lambda f: replace(f, infos=f.infos[::-1])
    yield "tensors twice", lambda f: replace(f, infos=f.infos * 2)
    yield "keys reversed", lambda f: replace(f, keys=f.keys[::-1])
    for key in file.keys:
        label = key.name.decode()
        yield f"{label} left out", lambda f, key=key: f.with_key(key.name)
        yield f"{label} twice", lambda f, key=key: replace(f, keys=(*f.keys, key))
        for name, changed in _of_key(key):
            yield f"{label} {name}", lambda f, key=key, new=changed: f.with_key(key.name, new)
    yield from _added(file)
    for info in file.infos:
        label = info.name.decode()
        yield f"{label} left out", lambda f, info=info: f.with_info(info.name)
        for name, resized in _of_info(info):
            yield f"{label} {name}", lambda f, info=info, new=resized: f.with_info(info.name, new)


def _added(file: File) -> Iterator[tuple[str, Change]]:
    arch = next(key.value for key in file.keys if key.name == b"general.architecture")
    there = {key.name for key in file.keys}
    names = {f"{arch}.{name}": values for name, values in ADDED.items()} | TOKENIZER_ADDED
    for name, values in names.items():
        if name.encode() in there:
            continue
        for value in values:
            new = key_of(name, value)
            yield (
                f"{name} added = {str(value)[:24]!r}",
                lambda f, new=new: replace(f, keys=(*f.keys, new)),
            )
    if b"tokenizer.ggml.scores" not in there:
        n = next((len(key.items) for key in file.keys if key.name.endswith(b".tokens")), 0)
        scores = Key(b"tokenizer.ggml.scores", ARRAY, b"", F32, (bytes(4),) * n)
        spm = key_of("tokenizer.ggml.model", "llama")
        yield "scores added", lambda f: replace(f, keys=(*f.keys, scores))
        yield "as SPM", lambda f: f.with_key(spm.name, spm, scores)


def _blind(content: bytes, n_header: int, seed: int) -> Iterator[Mutation]:
    rng = random.Random(seed)
    size = len(content)

    def flipped(places: tuple[int, ...], bits: int) -> Callable[[], bytes]:
        def make() -> bytes:
            changed = bytearray(content)
            for place in places:
                changed[place] ^= bits
            return bytes(changed)

        return make

    def spliced(start: int, length: int, to: int) -> Callable[[], bytes]:
        def make() -> bytes:
            changed = bytearray(content)
            changed[to : to + length] = content[start : start + length]
            return bytes(changed)

        return make

    for number in range(400):
        end = n_header if number % 4 else size
        places = tuple(rng.randrange(end) for _ in range(rng.choice((1, 1, 1, 4, 32))))
        bits = rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 255))
        yield Mutation(f"flipped {number}", flipped(places, bits))
    for number in range(100):
        end = n_header if number % 2 else size
        length = rng.choice((1, 4, 8, 64, 1024, 65536))
        start, to = rng.randrange(end), rng.randrange(end)
        yield Mutation(f"spliced {number}", spliced(start, length, to))
    cuts = [rng.randrange(n_header) for _ in range(30)] + [rng.randrange(size) for _ in range(20)]
    for length in (0, 1, 4, 23, 24, n_header, size - 1, *cuts):
        yield Mutation(f"cut to {length}", lambda length=length: content[:length])
    yield Mutation("one byte more", lambda: content + b"\0")
