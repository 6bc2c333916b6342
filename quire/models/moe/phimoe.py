"""Phi-3.5-MoE: Phi's norms and biases, and two experts that a sparse mixer chooses one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.experts import ExpertNames, MixtureOfExperts, Router, Rule, SparseLayer
from quire.layers.norm import LayerNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Sizes
from quire.models.moe.reading import SparseStack, chosen
from quire.models.window import layer_windows

architectures = ("PhimoeForCausalLM", "PhiMoEForCausalLM")
defaults = {  # as transformers has them
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "sliding_window": None,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.01,
    "input_jitter_noise": 0.0,
    "attention_bias": False,
    "lm_head_bias": False,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
rotary = {"rope_theta": 1000000.0, "short_mscale": 0.0, "long_mscale": 0.0}
aliases = {"num_experts": "num_local_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
RENAMED = {".block_sparse_moe.": ".mlp.", ".mlp.router.": ".mlp.gate."}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    """`input_jitter_noise` is of training alone; `router_jitter_noise` says which experts the mixer weighs."""
    sizes = Sizes.read(config)
    cos_sin = rotary_table({**config, "rope_parameters": _scaled(config, max_positions)}, sizes.head_dim, max_positions)
    windows = layer_windows({**config, "layer_types": None}, sizes.layers, max_positions)
    bias = read(bool, config, "attention_bias")
    experts, top_k = chosen(config, "num_local_experts", "num_experts_per_tok")
    if top_k != 2:
        raise ConfigError(
            f"config.json: num_experts_per_tok={top_k} is not supported: the mixer chooses 2", "num_experts_per_tok"
        )
    rule = Rule(experts, top_k, scoring="sparse_mixer", jitter=read(float, config, "router_jitter_noise"))
    names = ExpertNames(gate="w1", up="w3", down="w2")

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> SparseLayer:
        attention = Attention(index, *sizes.attention, cos_sin, window=windows[index], qkv_bias=bias, out_bias=bias)
        mlp = MixtureOfExperts(sizes.hidden, sizes.intermediate, Router(sizes.hidden, rule), names=names)
        return SparseLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    tied, logits = read(bool, config, "tie_word_embeddings"), Logits(bias=read(bool, config, "lm_head_bias"))
    return SparseStack(sizes, layer, tied=tied, norm=norm(), logits=logits, renamed=RENAMED)


def _scaled(config: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """Its rotary settings, where stretched tables have a factor of their own for either length.

    Raises ConfigError for other ways to stretch, or without the factors.
    """
    rope: dict[str, Any] = config["rope_parameters"]
    if rope["rope_type"] == "default":
        return rope
    if rope["rope_type"] != "longrope":
        raise ConfigError(
            f"config.json: rope_type={rope['rope_type']} is not supported: default or longrope", "rope_type"
        )
    key = "long_mscale" if max_positions > rope["original_max_position_embeddings"] else "short_mscale"
    if rope[key] <= 0:
        raise ConfigError(f"config.json: {key} of rope_type=longrope must be > 0, got {rope[key]:g}", key)
    return {**rope, "attention_factor": rope[key]}
