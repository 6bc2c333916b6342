"""Solar Open: GLM-4.5's experts in every layer, and Llama's attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import SparseStack, grouped_rule

architectures = ("SolarOpenForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 196608,
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "moe_intermediate_size": 1280,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "first_k_dense_replace": (0, None),
    "use_qk_norm": (False, None),
}
rotary = {"rope_theta": 1000000.0, "partial_rotary_factor": 1.0}
aliases = {"num_local_experts": "n_routed_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "moe_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin, bias = rotary_table(config, sizes.head_dim, max_positions), read(bool, config, "attention_bias")
    rule, inner = grouped_rule(config, "n_routed_experts"), read_positive(config, "moe_intermediate_size")
    shared_inner = inner * read_positive(config, "n_shared_experts")

    def layer(index: int) -> SparseLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias)
        router = Router(sizes.hidden, rule, correction="e_score_correction_bias")
        mlp = MixtureOfExperts(sizes.hidden, inner, router, shared=shared_inner)
        return SparseLayer(attention, mlp, sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
