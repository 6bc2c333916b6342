"""dots.llm1: experts chosen by sigmoids, shared ones, and some dense layers at the front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import SparseStack, grouped_rule, later_layers
from quire.models.window import layer_windows

architectures = ("Dots1ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "sliding_window": 4096,
    "max_window_layers": 62,
    "layer_types": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": None,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
aliases = {"num_local_experts": "n_routed_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias = read(bool, config, "attention_bias")
    windows = layer_windows(config, sizes.layers, max_positions, first_layer=read_count(config, "max_window_layers"))
    rule, inner = grouped_rule(config, "n_routed_experts"), read_positive(config, "moe_intermediate_size")
    shared_inner, sparse = inner * read_positive(config, "n_shared_experts"), later_layers(config, sizes.layers)

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index not in sparse:
            return GatedMLP(sizes.hidden, sizes.intermediate)
        router = Router(sizes.hidden, rule, correction="e_score_correction_bias")
        return MixtureOfExperts(sizes.hidden, inner, router, shared=shared_inner)

    def layer(index: int) -> SparseLayer:
        attention = Attention(
            index, *sizes.attention, cos_sin, window=windows[index], qkv_bias=bias, out_bias=bias, qk_norm_eps=sizes.eps
        )
        return SparseLayer(attention, mlp(index), sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
