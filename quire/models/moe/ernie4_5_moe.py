"""ERNIE 4.5 with experts: a correction of softmax's choice, shared experts, dense layers at either end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from quire.config.reading import read, read_count, read_positive
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import SparseStack, top_k_rule

architectures = ("Ernie4_5_MoeForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 103424,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "use_bias": False,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
rotary = {"rope_theta": 500000.0}
aliases = {
    "num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k", "num_local_experts": "moe_num_experts",
}  # fmt: skip
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
CORRECTION = "e_score_correction_bias"
RENAMED = {f"mlp.moe_statics.{CORRECTION}": f"mlp.gate.{CORRECTION}"}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin, bias = rotary_table(config, sizes.head_dim, max_positions), read(bool, config, "use_bias")
    rule = replace(
        top_k_rule(config, "moe_num_experts", renormalize=True, top_k_key="moe_k"),
        least_sum=read(float, config, "moe_norm_min"),
    )
    inner, shared_inner = read_positive(config, "moe_intermediate_size"), read_count(config, "moe_num_shared_experts")
    sparse = _sparse(config, sizes.layers)

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index not in sparse:
            return GatedMLP(sizes.hidden, sizes.intermediate, bias=bias)
        router = Router(sizes.hidden, rule, correction=CORRECTION, lines=1, dtype=torch.float32)
        return MixtureOfExperts(sizes.hidden, inner, router, shared=inner * shared_inner, shared_bias=bias)

    def layer(index: int) -> SparseLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, interleaved=True)
        return SparseLayer(attention, mlp(index), sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), renamed=RENAMED)


def _sparse(config: Mapping[str, Any], layers: int) -> set[int]:
    """Numbers of the layers that have experts: every so many of those from the first to the last."""
    last, step = read_count(config, "moe_layer_end_index", least=-1), read_positive(config, "moe_layer_interval")
    first, end = read_count(config, "moe_layer_start_index"), layers if last == -1 else last + 1
    return {index for index in range(first, min(end, layers)) if (index + 1) % step == 0}
