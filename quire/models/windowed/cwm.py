"""Code World Model: Llama with windows in three of four layers."""

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

architectures = ("CwmForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 128256,
    "hidden_size": 6144,
    "intermediate_size": 21504,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "mlp_bias": False,
    "sliding_window": 8192,
    "layer_types": None,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
rotary = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin, mlp_bias = rotary_table(config, sizes.head_dim, max_positions), read(bool, config, "mlp_bias")
    kinds = config["layer_types"]
    if kinds is None:
        kinds = ["sliding_attention" if index % 4 else "full_attention" for index in range(sizes.layers)]
    windows = layer_windows({**config, "layer_types": kinds}, sizes.layers, max_positions)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, *sizes.attention, cos_sin, window=windows[index])
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act, bias=mlp_bias)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
