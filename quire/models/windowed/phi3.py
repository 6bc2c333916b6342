"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, LongRoPE and a share of the head that turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.window import layer_windows

architectures = ("Phi3ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "sliding_window": None,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
rotary = {"original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    kind = config["rope_parameters"]["rope_type"]
    if kind not in ("default", "longrope"):
        raise ConfigError(f"config.json: rope_type must be default or longrope for Phi-3, got {kind!r}", "rope_type")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    windows = layer_windows({**config, "layer_types": None}, sizes.layers, max_positions)

    def layer(index: int) -> DecoderLayer:
        qkv = Linear.qkv(*sizes.attention, bias=False, fused="qkv_proj")
        attention = Attention(index, *sizes.attention, cos_sin, window=windows[index], qkv=qkv)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act, fused="gate_up_proj")
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
