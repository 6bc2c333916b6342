"""GLM-4.5 to 4.7: experts chosen by sigmoids, shared ones, and some dense layers at the front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import SparseStack, grouped_rule, later_layers

architectures = ("Glm4MoeForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "use_qk_norm": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_mtp_layers": 1,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
rotary = {"partial_rotary_factor": 0.5}
aliases = {"num_nextn_predict_layers": "num_mtp_layers", "num_local_experts": "n_routed_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias = read(bool, config, "attention_bias")
    qk_norm_eps = sizes.eps if read(bool, config, "use_qk_norm") else None
    rule, inner = grouped_rule(config, "n_routed_experts"), read_positive(config, "moe_intermediate_size")
    shared_inner, sparse = inner * read_positive(config, "n_shared_experts"), later_layers(config, sizes.layers)

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index not in sparse:
            return GatedMLP(sizes.hidden, sizes.intermediate)
        router = Router(sizes.hidden, rule, correction="e_score_correction_bias")
        return MixtureOfExperts(sizes.hidden, inner, router, shared=shared_inner)

    def layer(index: int) -> SparseLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, qk_norm_eps=qk_norm_eps)
        return SparseLayer(attention, mlp(index), sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
