"""Mellum 2: Qwen3-MoE's layers, with windows and a rotation of their own in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import SparseStack, top_k_rule, typed_layers
from quire.models.window import layer_windows

architectures = ("MellumForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 98304,
    "hidden_size": 2304,
    "intermediate_size": 7168,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "sliding_window": 1024,
    "layer_types": None,
    "moe_intermediate_size": 896,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "mlp_layer_types": None,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
rotary = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
aliases = {"num_local_experts": "num_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    kinds = config["layer_types"] or ["full_attention"] * sizes.layers
    windows = layer_windows({**config, "layer_types": kinds}, sizes.layers, max_positions)
    tables = {kind: rotary_table(config, sizes.head_dim, max_positions, kind) for kind in sorted({*kinds})}
    bias, rule = read(bool, config, "attention_bias"), top_k_rule(config, "num_experts")
    inner, sparse = read_positive(config, "moe_intermediate_size"), typed_layers(config, sizes.layers, 0)

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index not in sparse:
            return GatedMLP(sizes.hidden, sizes.intermediate)
        return MixtureOfExperts(sizes.hidden, inner, Router(sizes.hidden, rule))

    def layer(index: int) -> SparseLayer:
        attention = Attention(
            index, *sizes.attention, tables[kinds[index]], window=windows[index], qkv_bias=bias, out_bias=bias,
            qk_norm_eps=sizes.eps,
        )  # fmt: skip
        return SparseLayer(attention, mlp(index), sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
