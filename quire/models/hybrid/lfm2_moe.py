"""LFM2 with experts in all but the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.layers.experts import ExpertNames, MixtureOfExperts, Router, Rule
from quire.layers.mlp import GatedMLP
from quire.models.base import DecoderStack, Sizes
from quire.models.hybrid.lfm2 import KINDS, stack
from quire.models.hybrid.reading import kinds_of_layers
from quire.models.moe.reading import chosen

architectures = ("Lfm2MoeForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "conv_bias": False,
    "conv_L_cache": 3,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "layer_types": None,
}
fixed = {"is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "hidden_size")
aliases = {"tie_embedding": "tie_word_embeddings", "num_local_experts": "num_experts"}
rotary = {"rope_theta": 1000000.0}
NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config, eps="norm_eps")
    experts, top_k = chosen(config, "num_experts", "num_experts_per_tok")
    scale, renormalize = read(float, config, "routed_scaling_factor"), read(bool, config, "norm_topk_prob")
    rule = Rule(experts, top_k, scoring="sigmoid", renormalize=renormalize, scale=scale, least_sum=1e-6)
    correction = "expert_bias" if read(bool, config, "use_expert_bias") else None
    inner, dense = read_positive(config, "moe_intermediate_size"), read_count(config, "num_dense_layers")

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index < dense:
            return GatedMLP(sizes.hidden, sizes.intermediate)
        return MixtureOfExperts(sizes.hidden, inner, Router(sizes.hidden, rule, correction=correction), names=NAMES)

    return stack(config, max_positions, sizes, kinds_of_layers(config, "layer_types", KINDS, sizes.layers), mlp)
