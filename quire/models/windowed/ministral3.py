"""Ministral 3 and Mistral Large 3's dense kin: Mistral with queries that grow with the logarithm of their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import position_scales, rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.window import layer_windows

architectures = ("Ministral3ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "sliding_window": None,
}
fixed = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "rope_interleaved": (None, False, True),  # as Mistral's own form has it
}
rotary = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, rope = Sizes.read(config), config["rope_parameters"]
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    windows = layer_windows({**config, "layer_types": None}, sizes.layers, max_positions)
    scales = position_scales(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"], max_positions)
    act = read(str, config, "hidden_act")

    def layer(index: int) -> DecoderLayer:
        attention = Attention(
            index,
            *sizes.attention,
            cos_sin,
            window=windows[index],
            query_scales=scales,
            interleaved=read(bool, config, "rope_interleaved", False),
        )
        return DecoderLayer(attention, GatedMLP(sizes.hidden, sizes.intermediate, act=act), sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
