"""ERNIE 4.5, dense: Llama in which adjacent columns turn, tied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes

architectures = ("Ernie4_5ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "use_bias": False,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
rotary = {"rope_theta": 500000.0}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin, bias = rotary_table(config, sizes.head_dim, max_positions), read(bool, config, "use_bias")

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, interleaved=True)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act, bias=bias)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
