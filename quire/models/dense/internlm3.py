"""InternLM 3: Llama with biases where it is told to have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes

architectures = ("InternLM3ForCausalLM",)
defaults = {  # as its own config class has them
    "vocab_size": 128512,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "qkv_bias": False,
    "bias": False,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin, bias = rotary_table(config, sizes.head_dim, max_positions), read(bool, config, "bias")
    qkv_bias = read(bool, config, "qkv_bias")

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=qkv_bias, out_bias=bias)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act, bias=bias)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
