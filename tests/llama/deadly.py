"""Mutations that ended the process before the bridge looked for them, one of each kind.

By the tiny model's architecture: the mutation's name in ``mutations.of``, and a word of what the
bridge says instead of loading the file. What libllama did: an assertion, unless a comment tells.
"""

from __future__ import annotations

DEADLY: dict[str, dict[str, str]] = {
    "qwen35": {
        "qwen35.attention.layer_norm_rms_epsilon = -1.0": "0 is the least",
        "qwen35.attention.layer_norm_rms_epsilon = nan": "0 is the least",
        "qwen35.rope.dimension_count = 3": "3 rotated dimensions",
        "qwen35.rope.dimension_count = 48": "48 rotated dimensions",
        "qwen35.rope.dimension_sections all zero": "rotary sections",
        "qwen35.rope.dimension_sections all huge": "rotary sections",
        "qwen35.rope.scaling.type added = 'nonsense'": "rotary scaling",
        "qwen35.ssm.inner_size = 7": "recurrent state of 7",
        "qwen35.ssm.inner_size = 1048576": "recurrent state of 1048576",
        "qwen35.full_attention_interval = 0": "interval of 0",  # SIGFPE
        "qwen35.expert_count added = '3'": "0 of 3 experts",
        "qwen35.expert_group_count added = '3'": "3 groups",
        "blk.0.attn_qkv.weight left out": "block 0 has no attn_qkv",  # SIGSEGV
        "blk.0.attn_gate.weight left out": "block 0 has no attn_qkv attn_gate",  # SIGSEGV
        "blk.0.attn_norm.weight type 1": "cannot be of type 1",
        "blk.0.ssm_conv1d.weight type 1": "cannot be of type 1",
        "blk.0.ffn_up.weight type 24": "cannot be of type 24",  # SIGSEGV
        "token_embd.weight type 28": "cannot be of type 28",
        "tokenizer.ggml.tokens [0] = 'a'": "occurs twice",
        "tokenizer.ggml.tokens all as the first": "occurs twice",
    },
    "qwen35moe": {"qwen35moe.expert_count left out": "2 of 0 experts"},
    "glm4moe": {
        "glm4moe.expert_count = 1048576": "1048576 experts",
        "glm4moe.expert_count = 0": "2 of 0 experts",
        "glm4moe.expert_used_count = 0": "0 of 4 experts",
        "glm4moe.expert_used_count = 16": "16 of 4 experts",
        "glm4moe.expert_gating_func = 7": "gating function 7",
        "glm4moe.expert_group_count added = '3'": "groups of 4 experts",
        "glm4moe.rope.dimension_count = 0": "0 rotated dimensions",  # looped for ever
        "glm4moe.rope.dimension_count = 65": "65 rotated dimensions",
    },
    "step35": {
        "step35.rope.dimension_count = 1": "0 rotated dimensions",  # looped for ever
        "step35.rope.dimension_count_swa added = '0'": "0 rotated",  # looped for ever
        "step35.attention.sliding_window = 2147483648": "absurd",  # an exception that none catches
        "step35.attention.sliding_window_pattern all zero": "no layer has a sliding window",
        "step35.attention.sliding_window_pattern the first only": "no layer has a sliding window",
        "blk.0.ffn_down.weight left out": "block 0 has no ffn_gate ffn_up ffn_down",
        "blk.1.ffn_down_exps.weight left out": "block 1 has no ffn_gate_exps",  # SIGSEGV
    },
    "hy_v3": {"hy_v3.rope.dimension_count = 16": "not all"},
    "mimo2": {"blk.2.ffn_gate.weight left out": "block 2 has no ffn_gate ffn_up ffn_down"},
    "cohere2moe": {
        "cohere2moe.attention.sliding_window_pattern all zero": "no layer has a sliding window",
        "cohere2moe.rope.dimension_count = 16": "not all",
    },
    "deepseek2": {
        "deepseek2.attention.head_count_kv = 2": "2 heads of latent keys",
        "deepseek2.attention.key_length = 64": "latent keys of 64, not 48",
        "deepseek2.attention.key_length left out": "latent keys of 32, not 48",
        "deepseek2.attention.key_length_mla = 16": "16 rotated dimensions",
        "deepseek2.rope.dimension_count = 65": "65 rotated dimensions",
        "deepseek2.attention.temperature_scale added = '-1.0'": "temperature scale of -1.0",
    },
    "deepseek32": {"deepseek32.nextn_predict_layers = 3": "all of them NextN blocks"},  # SIGFPE
    "glm-dsa": {"blk.0.indexer.proj.weight left out": "block 0 has no indexer.proj"},  # SIGSEGV
    "nemotron_h_moe": {
        "blk.0.ssm_conv1d.bias left out": "block 0 has no ssm_conv1d.bias",  # SIGSEGV
        "blk.2.ffn_latent_down.weight left out": "block 2 has no ffn_latent_down",
    },
    "bailingmoe3": {
        "bailingmoe3.kda.gate_lower_bound = 0.0": "lower bound of 0.0",
        "bailingmoe3.kda.safe_gate = 0": "gates without a lower bound",
        "bailingmoe3.expert_gating_func = 0": "gating function 0",
    },
    "deepseek4": {
        # Built graphs without end.
        "deepseek4.hyper_connection.sinkhorn_iterations = 1048576": "1048576 Sinkhorn iterations",
        "deepseek4.attention.output_group_count = 0": "0 groups",  # SIGFPE
    },
    "gemma4": {
        "gemma4.attention.shared_kv_layers added = '3'": "3 of 3 layers without cells",
        "gemma4.attention.shared_kv_layers added = '1'": "cells that do not exist",
    },
}
