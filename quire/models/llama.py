"""Llama 2 and 3.x, and models of the same make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes

architectures = ("LlamaForCausalLM", "LLaMAForCausalLM", "AquilaForCausalLM", "XverseForCausalLM")
defaults = {  # as transformers has them
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    attention_bias = read(bool, config, "attention_bias")
    mlp_bias = read(bool, config, "mlp_bias")

    def layer(index: int) -> DecoderLayer:
        attention = Attention(
            index,
            sizes.hidden,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            cos_sin,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
        )
        return DecoderLayer(
            attention, GatedMLP(sizes.hidden, sizes.intermediate, bias=mlp_bias), sizes.hidden, sizes.eps
        )

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
