"""Apertus: a plain feed-forward with xIELU, norms of query and key heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.activation import XIELU
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import MLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("ApertusForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "xielu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
rotary = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMING = Naming(parts={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"})


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias = read(bool, config, "attention_bias")

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, qk_norm_eps=sizes.eps)
        mlp = MLP(sizes.hidden, sizes.intermediate, XIELU() if act == "xielu" else act, bias=False)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=NAMING)
