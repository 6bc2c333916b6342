"""Mistral 4 (Mistral Small 4): latent attention whose queries grow with the logarithm of their position, experts chosen
by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.layers.experts import SparseLayer
from quire.layers.rotary import position_scales
from quire.models.base import DecoderStack, Sizes
from quire.models.latent.reading import feed_forward, latent_attention, latent_shape
from quire.models.moe.reading import SparseStack, grouped_rule, later_layers

architectures = ("Mistral4ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_interleave": True,
    "attention_bias": False,
    "head_dim": None,  # this one and the next follow from others
    "qk_head_dim": None,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
}
fixed = {"hidden_act": ("silu", "swish"), "is_causal": (True, None), "is_encoder_decoder": (False, None)}
aliases = {"num_local_experts": "n_routed_experts"}
rotary = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 0.5,
}
shared = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, rope = Sizes.read(config), config["rope_parameters"]
    shape = latent_shape(config, sizes)
    columns = shape.nope + shape.rope
    told = rope["partial_rotary_factor"]
    if int(columns * told) != shape.rope and told != rotary["partial_rotary_factor"]:  # which may not be said
        raise ConfigError(
            f"config.json: partial_rotary_factor={told:g} must be qk_rope_head_dim={shape.rope} of {columns}",
            "partial_rotary_factor",
        )
    scales = position_scales(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"], max_positions)
    turned = read(bool, config, "rope_interleave")
    attention = latent_attention(config, sizes, max_positions, interleaved=turned, query_scales=scales)
    rule = grouped_rule(config, "n_routed_experts", scoring="softmax")
    mlp = feed_forward(config, sizes, rule, later_layers(config, sizes.layers), correction=None)

    def layer(index: int) -> SparseLayer:
        return SparseLayer(attention(index), mlp(index), sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
