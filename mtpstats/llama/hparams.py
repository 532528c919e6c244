"""What a model's metadata may say, held against the shapes of its tensors.

llama.cpp asserts, divides by zero or loops for ever on values that no converter writes; what it
checks itself, to fail with a message, is left to it. Keys are named without the architecture's
prefix. What depends on an architecture's graph is asked of the known ones only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from mtpstats.llama import arch
from mtpstats.text import printable

if TYPE_CHECKING:
    from mtpstats.llama.gguf import ModelHeader

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_BLOCK = 32  # values of a quantised type with one scale
_MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
_MAX_CONTEXT = 1 << 25  # llama.cpp keeps some 50 bytes per cell, whatever the model
_MAX_WINDOW = 1 << 22  # times the sequences it must fit into 32 bits
_MAX_ITERATIONS = 64  # each adds operators to the graph of every layer
_SCALINGS = ("none", "linear", "yarn", "longrope")


def check(header: ModelHeader, refuse: Callable[[str], NoReturn]) -> None:
    """Refuse what libllama would not survive."""
    checker = _Checker(header, refuse)
    checker.sizes()
    checker.experts()
    if header.arch in arch.KNOWN or header.arch in arch.COMPANIONS:
        checker.windows()
        checker.rotary()
        checker.heads()
        checker.special()


def check_shared(head: ModelHeader, target: ModelHeader, refuse: Callable[[str], NoReturn]) -> None:
    """Refuse a head that reads the cells of another target than the one it was made for."""
    ours, theirs = _Checker(head, refuse), _Checker(target, refuse)
    for i, windowed in enumerate(ours.windowed):
        other = theirs.layers - (2 if windowed else 1)
        if ours.cells(i) != theirs.cells(other):
            refuse(f"its layer {i} cannot read the cells of the target's layer {other}")


def check_caches(
    header: ModelHeader,
    type_k: str,
    type_v: str,
    quantised: Sequence[str],
    refuse: Callable[[str], NoReturn],
) -> None:
    """Refuse types of the caches that the attention of this model cannot read."""
    checker = _Checker(header, refuse)
    same = type_k == type_v or not (
        checker.integer("attention.key_length_mla") or checker.arch == "deepseek4"
    )
    checker.demand(
        same, f"keeps K and V in one cache: give both one type, not {type_k} and {type_v}"
    )
    for what, name in (("key", type_k), ("value", type_v)):
        for length in {checker.length(what, windowed) for windowed in checker.windowed}:
            checker.demand(
                name not in quantised or length % _BLOCK == 0,
                f"has heads with {what}s of {length}: {name} takes multiples of {_BLOCK}; choose "
                "f16",
            )


class _Checker:
    def __init__(self, header: ModelHeader, refuse: Callable[[str], NoReturn]) -> None:
        self.header = header
        self.refuse = refuse
        self.arch = header.arch
        self.metadata = header.first.metadata
        self.layers = self.integer("block_count")
        self.nextn = self.integer("nextn_predict_layers")
        self.trunk = self.layers - self.nextn

    def integer(self, name: str, default: int = 0) -> int:
        value = self.header.hparam(name)
        return default if value is None else value

    def real(self, name: str, default: float) -> float:
        value = self.metadata.get(f"{self.arch}.{name}")
        return value if isinstance(value, float) else default

    def each(self, name: str, default: int = 0) -> list[int]:
        """Return the value of every layer: of a list, or of one number for all."""
        value = self.metadata.get(f"{self.arch}.{name}", default)
        if isinstance(value, int | float):
            return [int(value)] * self.layers
        numbers = [int(number) for number in getattr(value, "values", ())[: self.layers]]
        return numbers + [0] * (self.layers - len(numbers))

    def extent(self, tensor: str, axis: int) -> int | None:
        """Return an extent of a tensor, 1 beyond its dimensions, None where there is no tensor."""
        found = self.header.tensors.get(tensor)
        if found is None:
            return None
        return found.shape[axis] if axis < len(found.shape) else 1

    def demand(self, holds: bool, what: str) -> None:
        if not holds:
            self.refuse(what)

    # -- any architecture ---------------------------------------------------------------------

    def sizes(self) -> None:
        """Numbers that are absurd by themselves."""
        layers, nextn = self.layers, self.nextn
        known = self.header.hparam("block_count") is not None
        self.demand(
            0 < layers <= MAX_LAYERS or not known,
            f"{layers} layers; 1 to {MAX_LAYERS} are possible",
        )
        self.demand(0 <= nextn <= layers, f"{nextn} NextN blocks among {layers} layers")
        for key, value in self.metadata.items():
            if not key.startswith(f"{self.arch}."):
                continue
            if isinstance(value, int):
                self.demand(value < 1 << 31, f"{printable(key)} is {value}, which is absurd")
            elif isinstance(value, float) and key.endswith("epsilon"):
                self.demand(0 <= value < math.inf, f"{printable(key)} is {value}; 0 is the least")
        context = self.integer("context_length")
        self.demand(
            context <= _MAX_CONTEXT, f"a training context of {context}; {_MAX_CONTEXT} are possible"
        )
        scaling = self.metadata.get(f"{self.arch}.rope.scaling.type")
        if isinstance(scaling, str):
            self.demand(scaling in _SCALINGS, f"rotary scaling '{printable(scaling)}'")
        sections = f"{self.arch}.rope.dimension_sections" in self.metadata
        self.demand(
            not sections or self.integer("rope.dimension_count", 2) > 0,
            "rotary sections of no dimension",
        )
        rows = self.extent("token_embd.weight", 1)
        if self.header.vocabulary.kind in ("none", "no_vocab") and rows is not None:
            n_vocab = self.integer("vocab_size", rows)
            self.demand(n_vocab == rows, f"a vocabulary of {n_vocab}, and {rows} embeddings")

    def experts(self) -> None:
        """What llama.cpp asserts of experts."""
        total, groups = self.integer("expert_count"), self.integer("expert_group_count")
        used = self.each("expert_used_count")
        most = max(used, default=0)
        self.demand(total <= _MAX_EXPERTS, f"{total} experts; up to {_MAX_EXPERTS} are possible")
        self.demand(
            0 <= most <= total and (most > 0) == (total > 0), f"{most} of {total} experts in use"
        )
        for i, count in enumerate(used):
            routed = self.extent(f"blk.{i}.ffn_gate_inp.weight", 0) is not None
            # llama.cpp divides by it, by the first one for all blocks.
            routed |= self.arch in arch.ROUTED and i in (0, self.trunk)
            self.demand(count > 0 or not routed, f"no expert of block {i} in use")
        if groups:
            chosen = self.integer("expert_group_used_count")
            fits = groups == 1 or (total % groups == 0 and 0 < chosen < groups)
            self.demand(
                fits and groups < total, f"{chosen} of {groups} groups of {total} experts in use"
            )
        gating = self.integer("expert_gating_func", 1)
        least = 1 if self.arch in arch.GATED_AS_TOLD else 0
        self.demand(least <= gating <= 4, f"expert gating function {gating}")

    # -- known architectures ------------------------------------------------------------------

    @cached_property
    def windowed(self) -> list[bool]:
        """Which layers have a sliding window."""
        pattern = self.metadata.get(f"{self.arch}.attention.sliding_window_pattern")
        if self.arch == "deepseek4":
            return [True] * self.layers
        if self.arch not in arch.WINDOWED:
            return [False] * self.layers
        if self.arch == "cohere2moe" and (pattern is None or isinstance(pattern, int)):
            step = 4 if pattern is None else int(pattern)
            return [i < self.trunk and (step == 0 or i % step != 0) for i in range(self.layers)]
        return [bool(flag) for flag in self.each("attention.sliding_window_pattern")]

    def windows(self) -> None:
        """Sliding windows."""
        if self.arch not in arch.WINDOWED and self.arch != "deepseek4":
            return
        self.demand(any(self.windowed), "no layer has a sliding window")
        window = self.integer("attention.sliding_window")
        self.demand(
            window <= _MAX_WINDOW, f"a sliding window of {window}; {_MAX_WINDOW} is possible"
        )

    def length(self, what: str, windowed: bool) -> int:
        """Length of a head's "key" or "value"."""
        n_head = next(iter(self.each("attention.head_count")), 0)
        default = self.integer("embedding_length") // n_head if n_head > 0 else 0
        full = self.integer(f"attention.{what}_length", default)
        return self.integer(f"attention.{what}_length_swa", full) if windowed else full

    def kv_heads(self) -> list[int]:
        """Heads of keys of each layer."""
        name = "attention.head_count_kv"
        return self.each(name if f"{self.arch}.{name}" in self.metadata else "attention.head_count")

    def cells(self, i: int) -> tuple[bool, int, int]:
        """Whether a layer has a window, its heads of keys, and their length."""
        windowed = self.windowed[i]
        return windowed, self.kv_heads()[i], self.length("key", windowed)

    def rotary(self) -> None:
        """Rotated dimensions: ggml's loop over none of them never ends."""
        if self.arch in arch.UNROTATED:
            return
        head = self.length("key", False)
        sections = self.metadata.get(f"{self.arch}.rope.dimension_sections")
        if sections is not None:
            parts = [int(part) for part in getattr(sections, "values", ())]
            self.demand(
                min(parts, default=0) >= 0 and any(parts[:3]) and sum(parts) <= head,
                f"rotary sections of {parts} dimensions of heads of {head}",
            )
        full = self.integer("rope.dimension_count", head)
        windowed = self.integer("rope.dimension_count_swa", full)
        if self.arch == "step35":  # half of them where there is no window
            full //= 2
        if self.arch in arch.LATENT:
            head = self.integer("attention.key_length_mla", head)
            self.demand(full < head, f"{full} rotated dimensions, none of {head} left plain")
        for count, size in ((full, head), (windowed, self.length("key", True))):
            self.demand(
                count > 0 and count % 2 == 0 and (count <= size or self.arch in arch.LATENT),
                f"{count} rotated dimensions of heads of {size}",
            )
        self.demand(
            full == head or self.arch not in arch.ROTATED_WHOLE,
            f"{full} rotated dimensions of heads of {head}, not all",
        )
        extension = self.real("rope.scaling.yarn_ext_factor", 0.0)
        self.demand(0 <= extension < math.inf, f"a YaRN extension factor of {extension}")

    def heads(self) -> None:
        """Attention heads: their numbers and lengths must give the extents of the tensors."""
        n_head, n_head_kv = self.each("attention.head_count"), self.kv_heads()
        if self.arch not in arch.UNEQUAL_HEADS:
            for windowed in (False, True):
                key, value = self.length("key", windowed), self.length("value", windowed)
                self.demand(key == value, f"keys of {key} and values of {value}")
        gated = 2 if self.arch in arch.DELTA_NET else 1
        for i in range(self.layers):
            windowed, block = self.windowed[i], f"blk.{i}."
            key, value = self.length("key", windowed), self.length("value", windowed)
            q, kv = n_head[i], n_head_kv[i]
            if any(name.startswith(f"{block}ssm_") for name in self.header.tensors):
                continue
            if self.extent(f"{block}attn_kv_a_mqa.weight", 0) is not None:
                self.latent(i, q, kv)
                continue
            for tensor, axis, wanted in (
                ("attn_q", 1, q * key * gated),
                ("attn_k", 1, kv * key),
                ("attn_v", 1, kv * value),
                ("attn_qkv", 1, q * key * gated + kv * (key + value)),
                ("attn_output", 0, q * value),
            ):
                found = self.extent(f"{block}{tensor}.weight", axis)
                self.demand(
                    found in (None, wanted),
                    f"{q} and {kv} heads of {key} and {value} make {wanted} in block {i}, "
                    f"its {tensor} has {found}",
                )
                fits = q > 0 and kv > 0 and q % kv == 0
                self.demand(found is None or fits, f"{q} and {kv} attention heads in block {i}")

    def latent(self, i: int, q: int, kv: int) -> None:
        """Heads of latent attention: one of keys, the latent row and the rotated part of it."""
        if self.integer("attention.key_length_mla") == 0:  # an old file: rows are decompressed
            return
        rank = self.integer("attention.kv_lora_rank")
        rotated = self.integer("rope.dimension_count", self.length("key", False))
        self.demand(kv == 1, f"{kv} heads of latent keys in block {i}")
        key, value = self.length("key", False), self.length("value", False)
        self.demand(key == rank + rotated, f"latent keys of {key}, not {rank + rotated}")
        self.demand(value <= key, f"latent values of {value} within keys of {key}")
        value = self.integer("attention.value_length_mla")
        found = self.extent(f"blk.{i}.attn_output.weight", 0)
        self.demand(
            found in (None, q * value) and q > 0,
            f"{q} heads of {value} in block {i}, its attn_output has {found}",
        )

    def special(self) -> None:
        """What single architectures have."""
        self.demand(
            self.trunk > 0 or self.arch == "gemma4-assistant",
            f"{self.layers} layers, all of them NextN blocks",
        )
        if self.arch not in arch.WIDE_ROWS:
            width, out = self.integer("embedding_length"), self.integer("embedding_length_out")
            self.demand(out in (0, width), f"embeddings of {width} and rows of {out}")
        if self.arch in arch.DELTA_NET:
            self.delta_net()
        elif self.arch == "nemotron_h_moe":
            self.mamba()
        elif self.arch == "bailingmoe3":
            self.demand(self.integer("kda.head_dim") > 0, "heads of no dimension")
            bound = self.real("kda.gate_lower_bound", -1.0)
            self.demand(-math.inf < bound < 0, f"a gate's lower bound of {bound}")
            safe = self.metadata.get(f"{self.arch}.kda.safe_gate", True)
            self.demand(safe is not False, "gates without a lower bound")
        elif self.arch == "deepseek2" and self.nextn:
            scale = self.real("attention.temperature_scale", 0.0)
            self.demand(scale == 0, f"an attention temperature scale of {scale}, and NextN blocks")
        elif self.arch == "gemma4":
            self.shared_cells()
        elif self.arch == "deepseek4":
            self.hyper_connections()
        if self.arch in arch.INDEXED:
            self.indexer()

    def delta_net(self) -> None:
        """Gated delta net: states of heads times heads."""
        state, inner = self.integer("ssm.state_size"), self.integer("ssm.inner_size")
        heads, groups = self.integer("ssm.time_step_rank"), self.integer("ssm.group_count")
        self.demand(
            inner == heads * state and groups > 0 and heads % groups == 0 and heads > 0,
            f"a recurrent state of {inner} in {heads} heads of {state} and {groups} groups",
        )
        every = self.integer("full_attention_interval", 1)
        self.demand(every > 0, f"a full attention interval of {every}")

    def mamba(self) -> None:
        """Mamba 2."""
        inner, state = self.integer("ssm.inner_size"), self.integer("ssm.state_size")
        heads, groups = self.integer("ssm.time_step_rank"), self.integer("ssm.group_count")
        fits = min(inner, state, heads, groups) > 0
        self.demand(
            fits and inner % heads == 0 and inner % groups == 0 and heads % groups == 0,
            f"a recurrent state of {inner} in {heads} heads of {state} and {groups} groups",
        )

    def shared_cells(self) -> None:
        """Last layers that read the cells of an earlier layer of their own kind."""
        shared = self.integer("attention.shared_kv_layers")
        first = self.layers - shared
        self.demand(first >= 2, f"{shared} of {self.layers} layers without cells of their own")
        for flag in self.windowed[first:]:
            if self.windowed[first - (2 if flag else 1)] != flag:
                self.refuse(f"layers from {first} on share cells that do not exist")

    def hyper_connections(self) -> None:
        """DeepSeek 4's."""
        heads = self.each("attention.head_count")
        groups = self.integer("attention.output_group_count")
        self.demand(
            groups > 0 and all(q > 0 and q == heads[0] and q % groups == 0 for q in heads),
            f"{groups} groups of attention heads",
        )
        kv = self.each("attention.head_count_kv")
        self.demand(all(count == 1 for count in kv), "more than one head of keys")
        streams = self.integer("hyper_connection.count")
        self.demand(streams == 4, f"{streams} hyper connections; 4 can run")
        times = self.integer("hyper_connection.sinkhorn_iterations")
        self.demand(0 < times <= _MAX_ITERATIONS, f"{times} Sinkhorn iterations")
        hashed = self.integer("hash_layer_count")
        self.demand(hashed <= self.trunk, f"{hashed} hash layers")
        # llama.cpp divides by zero.
        same = self.length("key", False) == self.integer("attention.indexer.key_length")
        self.demand(not same, "an indexer with keys as long as the attention's")

    def indexer(self) -> None:
        """Which cells sparse attention reads; its keys go through a Hadamard matrix."""
        length = self.integer("attention.indexer.key_length")
        heads = self.integer("attention.indexer.head_count")
        self.demand(
            length >= 64 and length & (length - 1) == 0,
            f"indexer keys of {length}; a power of two from 64 on is possible",
        )
        rotated = self.integer("rope.dimension_count", length)
        self.demand(rotated <= length, f"{rotated} rotated dimensions of indexer keys of {length}")
        best = self.integer("attention.indexer.top_k")
        self.demand(heads > 0 and best > 0, f"an indexer of {heads} heads for {best} cells")
