"""Mixtral: Mistral's attention, and experts chosen by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.experts import ExpertNames, MixtureOfExperts, Router, SparseLayer
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import SparseStack, top_k_rule
from quire.models.window import layer_windows

architectures = ("MixtralForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
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
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.0,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "rope_interleaved": (None, False, True),  # as Mistral's own form has it
    "is_encoder_decoder": (False, None),
}
rotary = {"rope_theta": 1000000.0}
aliases = {"num_experts": "num_local_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    """`router_jitter_noise` is of training alone."""
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    windows = layer_windows({**config, "layer_types": None}, sizes.layers, max_positions)
    rule = top_k_rule(config, "num_local_experts", renormalize=True)
    names = ExpertNames(gate="w1", up="w3", down="w2")

    def layer(index: int) -> SparseLayer:
        attention = Attention(
            index,
            *sizes.attention,
            cos_sin,
            window=windows[index],
            interleaved=read(bool, config, "rope_interleaved", False),
        )
        mlp = MixtureOfExperts(sizes.hidden, sizes.intermediate, Router(sizes.hidden, rule), names=names)
        return SparseLayer(attention, mlp, sizes.hidden, sizes.eps)

    tied = read(bool, config, "tie_word_embeddings")
    return SparseStack(sizes, layer, tied=tied, renamed={".block_sparse_moe.": ".mlp."})
