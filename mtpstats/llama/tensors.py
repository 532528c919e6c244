"""The tensors of a model's file: types that have operators, and blocks that are whole.

llama.cpp takes many tensors only if they are there, and then follows null pointers in graphs that
need them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from mtpstats.llama import arch
from mtpstats.text import printable

if TYPE_CHECKING:
    from mtpstats.llama.gguf import ModelHeader

# ggml types that products take; the others are for sums, for indices and for ggml's own use.
_F32, _I32 = 0, 26
_PRODUCTS = frozenset(
    (_F32, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, *range(16, 24), 29, 30, 34, 35, 39, 40, 41, 42)
)
# Of two and more dimensions, but added, multiplied element by element or convolved.
_ELEMENTWISE = re.compile(r"norm(_\d)?\.weight$|\.bias$|ssm_(a|d)$|conv1d(_[qkv])?\.weight$")
_ONE_ROW = "ffn_gate_inp_shexp"  # a matrix all the same
_INDICES = re.compile(r"ffn_gate_tid2eid\.|masked_embd_ordering")

_BLOCK = re.compile(r"blk\.(\d{1,3})\.(.+)$", re.DOTALL)


def check(header: ModelHeader, refuse: Callable[[str], NoReturn]) -> None:
    """Refuse types and gaps that libllama would not survive."""
    for name, tensor in header.tensors.items():
        if _INDICES.search(name):
            fits = tensor.kind == _I32
        else:
            matrix = (len(tensor.shape) > 1 or _ONE_ROW in name) and not _ELEMENTWISE.search(name)
            fits = tensor.kind in _PRODUCTS if matrix else tensor.kind == _F32
        if not fits:
            refuse(f"tensor '{printable(name)}' cannot be of type {tensor.kind}")
    blocks: defaultdict[int, set[str]] = defaultdict(set)
    outside = set()
    for name in header.tensors:
        match = _BLOCK.match(name)
        if match:
            blocks[int(match[1])].add(match[2].removesuffix(".weight"))
        else:
            outside.add(name.removesuffix(".weight"))
    layers = header.hparam("block_count") or 0
    nextn = header.hparam("nextn_predict_layers") or 0
    if 0 < nextn < layers and header.arch in arch.KNOWN and header.arch != "qwen4exp":
        _ends(blocks, layers - nextn, refuse)
    if header.arch in arch.HYBRID:
        _both_kinds(blocks, layers - nextn, refuse)
    for i, held in sorted(blocks.items()):
        for alternatives in _needs(header.arch, held, i >= layers - nextn):
            if not any(outside | held >= set(needed.split()) for needed in alternatives):
                refuse(f"block {i} has no {' or '.join(alternatives)}")


def _ends(blocks: dict[int, set[str]], trunk: int, refuse: Callable[[str], NoReturn]) -> None:
    """A file that lacks the tensor by which llama.cpp knows trunk or head has nothing of it."""
    for marker, first, last in (("attn_norm", 0, trunk), ("nextn.eh_proj", trunk, trunk + 512)):
        present = any(first <= i < last for i in blocks)
        if present and marker not in blocks.get(first, ()):
            refuse(f"block {first} has no {marker}")


def _both_kinds(blocks: dict[int, set[str]], trunk: int, refuse: Callable[[str], NoReturn]) -> None:
    """A hybrid's graph reads both memories, and one without layers has no buffer."""
    recurrent = [any(one.startswith("ssm_") for one in blocks[i]) for i in blocks if i < trunk]
    attention = [
        "attn_output" in blocks[i] and not any(one.startswith("ssm_") for one in blocks[i])
        for i in blocks
        if i < trunk
    ]
    if recurrent and not (any(recurrent) and any(attention)):
        refuse("a hybrid model without an attention layer, or without a recurrent one")


def _needs(name: str, held: set[str], is_nextn: bool) -> Iterator[tuple[str, ...]]:
    """Yield what a block needs of the tensors that llama.cpp takes for optional.

    Each is a tuple of alternatives, each of these names of tensors.
    """
    dense, shared = "ffn_gate ffn_up ffn_down", "ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
    split, fused = "ffn_gate_exps ffn_up_exps ffn_down_exps", "ffn_gate_up_exps ffn_down_exps"
    routed = "ffn_gate_inp" in held
    if is_nextn and name in arch.ROUTED_HEADS:
        yield ("ffn_gate_inp",)
    if name in ("hy_v3", "step35"):
        if routed:
            yield (shared,)
        if is_nextn:
            yield ("output", "nextn.shared_head_head")
        yield (split, fused) if routed else (dense,)
    elif name == "mimo2":
        if is_nextn:
            yield ("attn_qkv",)
            yield (dense,)
        yield (split,) if routed else (dense,)
    elif name in ("qwen35", "qwen35moe") and "ssm_conv1d" in held:
        yield ("attn_qkv attn_gate",)
    elif name == "qwen3next" and "ssm_conv1d" in held:
        yield ("attn_qkv attn_gate", "ssm_in")
    elif name == "nemotron_h_moe":
        if "ssm_conv1d" in held:
            yield ("ssm_conv1d.bias",)
        if held & {"ffn_latent_down", "ffn_latent_up"}:
            yield ("ffn_latent_down ffn_latent_up",)
    elif name == "glm-dsa" and any(one.startswith("indexer") for one in held):
        yield ("indexer.proj indexer.attn_k indexer.attn_q_b",)
