"""SmolLM3: Llama with every fourth layer without positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import no_rotation, rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.window import layer_windows, turning_layers

architectures = ("SmolLM3ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
rotary = {"rope_theta": 2000000.0}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    turns = turning_layers(config, sizes.layers)
    cos_sin, still = rotary_table(config, sizes.head_dim, max_positions), no_rotation(max_positions, sizes.head_dim)
    bias, mlp_bias = read(bool, config, "attention_bias"), read(bool, config, "mlp_bias")
    kinds = config["layer_types"]
    if kinds is None:
        kinds = ["full_attention" if turn else "sliding_attention" for turn in turns]
    if not read(bool, config, "use_sliding_window") or config["sliding_window"] is None:
        kinds = ["full_attention"] * sizes.layers
    windows = layer_windows({**config, "layer_types": kinds}, sizes.layers, max_positions)

    def layer(index: int) -> DecoderLayer:
        table = cos_sin if turns[index] else still
        attention = Attention(index, *sizes.attention, table, window=windows[index], qkv_bias=bias, out_bias=bias)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act, bias=mlp_bias)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
