"""Hunyuan 3: experts chosen by sigmoids, shared ones, some dense layers, and norms of query and key heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router, Rule, SparseLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import SparseStack, chosen, typed_layers

architectures = ("HYV3ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 120832,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
    "enable_moe_fp32_combine": True,
    "mlp_layer_types": None,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
rotary = {"rope_theta": 11158840.0}
aliases = {"num_local_experts": "num_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
CORRECTION = "e_score_correction_bias"
RENAMED = {
    f".mlp.{CORRECTION}": f".mlp.gate.{CORRECTION}",
    ".mlp.expert_bias": f".mlp.gate.{CORRECTION}",
    ".mlp.router.gate.": ".mlp.gate.",
    ".mlp.shared_mlp.": ".mlp.shared_experts.",
}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    """`enable_moe_fp32_combine` is how sums are rounded: they are float32 here."""
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, mlp_bias = read(bool, config, "attention_bias"), read(bool, config, "mlp_bias")
    experts, top_k = chosen(config, "num_experts", "num_experts_per_tok")
    scale = read(float, config, "router_scaling_factor")
    rule = Rule(experts, top_k, scoring="sigmoid", renormalize=True, scale=scale)
    inner = read_positive(config, "moe_intermediate_size")
    shared_inner, sparse = inner * read_positive(config, "num_shared_experts"), typed_layers(config, sizes.layers, 1)

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index not in sparse:
            return GatedMLP(sizes.hidden, sizes.intermediate, bias=mlp_bias)
        router = Router(sizes.hidden, rule, correction=CORRECTION, dtype=torch.float32)
        return MixtureOfExperts(sizes.hidden, inner, router, shared=shared_inner, shared_bias=mlp_bias)

    def layer(index: int) -> SparseLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, qk_norm_eps=sizes.eps)
        return SparseLayer(attention, mlp(index), sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), renamed=RENAMED)
