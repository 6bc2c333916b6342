"""Mistral 7B and later dense ones: Llama's layers, with or without a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes

architectures = ("MistralForCausalLM",)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, cos_sin)
        return DecoderLayer(attention, GatedMLP(sizes.hidden, sizes.intermediate), sizes.hidden, sizes.eps)

    window = None if config.get("sliding_window") is None else read_positive(config, "sliding_window")
    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings", False), sliding_window=window)
