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

architectures = ("LlamaForCausalLM", "LLaMAForCausalLM")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    attention_bias = read(bool, config, "attention_bias", False)
    mlp_bias = read(bool, config, "mlp_bias", False)

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

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings", False))
