"""Metadata of tiny models: one function per architecture, and which tensors its files leave out.

A function returns what its architecture needs beyond ``common``, or instead of it; keys are
llama.cpp's without the architecture's prefix. Every kind of layer an architecture has is there at
least once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    n_vocab: int = 512
    n_embd: int = 64
    n_layer: int = 2  # of the trunk
    n_nextn: int = 1
    n_head: int = 2
    n_head_kv: int = 1
    n_ff: int = 128
    n_ctx: int = 512
    n_expert: int = 4
    n_expert_used: int = 2
    seed: int = 1
    f32: bool = False
    residual: float = 0.12
    noise: float = 0.2  # of the hidden row in eh_proj
    sharpness: float = 4.0  # standard deviation of the logits
    nan_in: str = ""  # name of a tensor to fill with NaN
    without: str = ""  # pattern of tensors to leave out of the file
    only: str = ""  # pattern of tensors to keep
    tokenizer: bool = True
    spm: bool = False  # pieces of SentencePiece instead of GPT-2's letters
    eog: int = 256  # the token that ends a text


def common(o: Options) -> dict[str, Any]:
    return {
        "block_count": o.n_layer + o.n_nextn,
        "nextn_predict_layers": o.n_nextn,
        "context_length": o.n_ctx,
        "embedding_length": o.n_embd,
        "feed_forward_length": o.n_ff,
        "attention.head_count": o.n_head,
        "attention.head_count_kv": o.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "vocab_size": o.n_vocab,
    }


def _experts(o: Options, dense: int = 1) -> dict[str, Any]:
    """Experts with a shared one in every block but the first ``dense``."""
    return {
        "expert_count": o.n_expert,
        "expert_used_count": o.n_expert_used,
        "expert_shared_count": 1,
        "expert_feed_forward_length": o.n_ff // 2,
        "expert_shared_feed_forward_length": o.n_ff // 2,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "leading_dense_block_count": dense,
    }


def _heads(o: Options) -> dict[str, Any]:
    return {
        "attention.key_length": o.n_embd // o.n_head,
        "attention.value_length": o.n_embd // o.n_head,
        "rope.dimension_count": o.n_embd // o.n_head,
    }


def _mla(o: Options) -> dict[str, Any]:
    """Multi-head latent attention: latent rows of 32 + 16 rotated, heads of 16 + 16."""
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 48,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 48,
        "attention.value_length": 32,
        "attention.key_length_mla": 32,
        "attention.value_length_mla": 16,
        "rope.dimension_count": 16,
    }


def _indexer() -> dict[str, Any]:
    # A power of two from 64 on, for it is rotated; and more positions than any test's text has,
    # since which of them win a close race is no fact to compare.
    return {
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 64,
        "attention.indexer.top_k": 512,
    }


def _windows(o: Options) -> dict[str, Any]:
    """A sliding window in every other layer, the first of the NextN blocks included."""
    return {
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [i % 2 for i in range(o.n_layer + o.n_nextn)],
        "rope.freq_base_swa": 1000.0,
    }


def _glm4moe(o: Options) -> dict[str, Any]:
    return {**_heads(o), **_experts(o)}


def _qwen35(o: Options) -> dict[str, Any]:
    head = o.n_embd // o.n_head
    return {
        **_heads(o),
        "rope.dimension_count": head // 2,
        "rope.dimension_sections": [head // 8, head // 8, 0, 0],
        "full_attention_interval": 2,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * head,
        "ssm.state_size": head,
        "ssm.time_step_rank": 2,
        "ssm.group_count": 2,
    }


def _qwen35moe(o: Options) -> dict[str, Any]:
    return {**_qwen35(o), **_experts(o, dense=0)}


def _qwen4exp(o: Options) -> dict[str, Any]:
    return {
        **_qwen35moe(o),
        **_indexer(),
        "attention.compress_ratios": [4] * (o.n_layer + o.n_nextn),
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": 8,
    }


def _nemotron_h_moe(o: Options) -> dict[str, Any]:
    # Mamba 2, attention, experts; a NextN block is attention and experts in one.
    layers = [*(0, 1, 2), *[2] * o.n_nextn]
    return {
        **_heads(o),
        **_experts(o),
        "block_count": len(layers),
        "attention.head_count_kv": [0 if kind == 0 else o.n_head_kv for kind in layers],
        "feed_forward_length": [o.n_ff if kind == 2 else 0 for kind in layers],
        "attention.layer_norm_epsilon": 1e-5,
        "moe_latent_size": o.n_embd // 2,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * o.n_embd,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 4,
        "ssm.group_count": 2,
    }


def _bailingmoe3(o: Options) -> dict[str, Any]:
    layers = o.n_layer + o.n_nextn
    return {
        **_mla(o),
        **_experts(o),
        "attention.head_count_kv": [0, *[1] * (layers - 1)],
        "ssm.conv_kernel": 4,
        "kda.head_dim": 32,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
    }


def _deepseek4(o: Options) -> dict[str, Any]:
    # Without compression, compressed by 4 with an indexer, compressed by 128; the NextN block has
    # none. The head's size differs from the indexer's, or llama.cpp divides by zero.
    return {
        **_experts(o, dense=0),
        **_indexer(),
        "block_count": 3 + o.n_nextn,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 16,
        "attention.q_lora_rank": 48,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 16,
        "attention.sliding_window": 16,
        "attention.compress_ratios": [0, 4, 128, *[0] * o.n_nextn],
        "attention.compress_rope_freq_base": 160000.0,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 0,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": [10.0] * (3 + o.n_nextn),
    }


def _deepseek2(o: Options) -> dict[str, Any]:
    return {**_mla(o), **_experts(o)}


def _deepseek32(o: Options) -> dict[str, Any]:
    return {**_mla(o), **_experts(o), **_indexer()}


def _cohere2moe(o: Options) -> dict[str, Any]:
    return {
        **_heads(o),
        **_experts(o),
        **_windows(o),
        "attention.head_count_kv": o.n_head,
        "attention.layer_norm_epsilon": 1e-5,
        "logit_scale": 1.0,
    }


def _step35(o: Options) -> dict[str, Any]:
    return {**_heads(o), **_experts(o), **_windows(o)}


def _gemma4(o: Options) -> dict[str, Any]:
    # The head shares the cells of the last layer with a window and of the last one without.
    return {
        **_heads(o),
        "block_count": 3,
        "nextn_predict_layers": 0,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [1, 1, 0],
        "attention.key_length_swa": o.n_embd // o.n_head // 2,
        "attention.value_length_swa": o.n_embd // o.n_head // 2,
        "rope.dimension_count_swa": o.n_embd // o.n_head // 2,
        "rope.freq_base_swa": 1000.0,
        "embedding_length_per_layer_input": 16,
        "final_logit_softcapping": 30.0,
    }


def _gemma4_assistant(o: Options) -> dict[str, Any]:
    # Twice as wide as its target: its own half is the target's row, so that it can agree.
    return {
        **_gemma4(o),
        "block_count": 2,
        "nextn_predict_layers": 2,
        "attention.sliding_window_pattern": [1, 0],
        "embedding_length": 2 * o.n_embd,
        "embedding_length_out": o.n_embd,
    }


def deepseek4_nextn_shapes(o: Options) -> dict[str, list[int]]:
    block = f"blk.{KEYS['deepseek4'](o)['block_count'] - o.n_nextn}.nextn"
    norms = ("enorm", "hnorm", "shared_head_norm")
    return {
        f"{block}.eh_proj.weight": [2 * o.n_embd, o.n_embd],
        **{f"{block}.{norm}.weight": [o.n_embd] for norm in norms},
    }


def gemma4_assistant_shapes(o: Options) -> dict[str, list[int]]:
    """Its tensors: llama.cpp cannot list those of a model that has metadata only."""
    wide, head = 2 * o.n_embd, o.n_embd // o.n_head
    shapes = {
        "token_embd.weight": [wide, o.n_vocab],
        "output_norm.weight": [wide],
        "nextn.pre_projection.weight": [2 * o.n_embd, wide],
        "nextn.post_projection.weight": [wide, o.n_embd],
        "rope_freqs.weight": [head // 2],
    }
    for i, size in enumerate((head // 2, head)):
        shapes |= {
            f"blk.{i}.{name}": shape
            for name, shape in {
                "attn_norm.weight": [wide],
                "attn_q.weight": [wide, size * o.n_head],
                "attn_q_norm.weight": [size],
                "attn_output.weight": [size * o.n_head, wide],
                "post_attention_norm.weight": [wide],
                "layer_output_scale.weight": [1],
                "ffn_norm.weight": [wide],
                "ffn_gate.weight": [wide, o.n_ff],
                "ffn_up.weight": [wide, o.n_ff],
                "ffn_down.weight": [o.n_ff, wide],
                "post_ffw_norm.weight": [wide],
            }.items()
        }
    return shapes


KEYS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "bailingmoe3": _bailingmoe3,
    "cohere2moe": _cohere2moe,
    "deepseek2": _deepseek2,
    "deepseek32": _deepseek32,
    "deepseek4": _deepseek4,
    "gemma4": _gemma4,
    "gemma4-assistant": _gemma4_assistant,
    "glm-dsa": _deepseek32,
    "glm4moe": _glm4moe,
    "hy_v3": _glm4moe,
    "mimo2": _step35,
    "nemotron_h_moe": _nemotron_h_moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen35moe,
    "qwen4exp": _qwen4exp,
    "step35": _step35,
}

# Tensors llama.cpp takes if they are there, and a file of this architecture has them elsewhere
# or in another form.
_MOE = r"(ffn_\w+_(exps|shexp)|ffn_gate_inp|exp_probs_b)"
_DENSE_FIRST = rf"blk\.0\.{_MOE}|blk\.[1-9]\.ffn_(gate|up|down)\."
_ONE_MOE = rf"blk\.[02-9]\.{_MOE}|blk\.1\.ffn_(gate|up|down)\."
LEFT_OUT: dict[str, str] = {
    "gemma4": r"_exps|ffn_gate_inp|norm_[12]\.",
    "hy_v3": _DENSE_FIRST,
    "mimo2": _ONE_MOE,
    "qwen3next": r"ssm_in\.",
    "step35": rf"{_DENSE_FIRST}|rope_freqs",
}
