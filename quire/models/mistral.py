"""Mistral 7B and later dense ones, Ministral 8B: Llama's layers, with sliding windows in all, some or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.window import layer_windows

architectures = ("MistralForCausalLM", "MinistralForCausalLM")
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
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "sliding_window": 4096,
    "layer_types": None,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "rope_interleaved": (None, False, True),  # as Mistral's own form has it
    "is_encoder_decoder": (False, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    windows = layer_windows(config, sizes.layers, max_positions)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(
            index,
            *sizes.attention,
            cos_sin,
            window=windows[index],
            interleaved=read(bool, config, "rope_interleaved", False),
        )
        return DecoderLayer(attention, GatedMLP(sizes.hidden, sizes.intermediate), sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
