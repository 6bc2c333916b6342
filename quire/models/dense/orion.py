"""Orion: Llama with layer norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes

architectures = ("OrionForCausalLM",)
defaults = {  # as its own config class has them
    "vocab_size": 84608,
    "hidden_size": 4096,
    "intermediate_size": 15360,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None), "attention_bias": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, *sizes.attention, cos_sin)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), norm=norm())
