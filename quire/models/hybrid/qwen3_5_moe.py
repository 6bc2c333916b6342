"""Qwen3.5's text models with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read_positive
from quire.layers.experts import MixtureOfExperts, Router
from quire.layers.recurrent.delta_net import GatedDeltaNet
from quire.models.base import DecoderStack, Sizes
from quire.models.hybrid.qwen3_5 import separate
from quire.models.hybrid.qwen3_next import stack
from quire.models.hybrid.reading import delta_sizes
from quire.models.moe.reading import top_k_rule

architectures = ("Qwen3_5MoeForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": None,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": None,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
fixed = {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False, None), "attn_output_gate": (True, None)}
shared = (
    "num_attention_heads",
    "num_key_value_heads",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
rotary = {"partial_rotary_factor": 0.25}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, states = Sizes.read(config), delta_sizes(config)
    rule, inner = top_k_rule(config, "num_experts", renormalize=True), read_positive(config, "moe_intermediate_size")
    shared = read_positive(config, "shared_expert_intermediate_size")

    def linear(index: int) -> GatedDeltaNet:
        return GatedDeltaNet(index, states, separate(states))

    def mlp(_: int) -> MixtureOfExperts:
        return MixtureOfExperts(
            sizes.hidden,
            inner,
            Router(sizes.hidden, rule),
            shared=shared,
            shared_name="shared_expert",
            shared_gate="shared_expert_gate",
        )

    return stack(config, max_positions, sizes, linear, mlp)
