"""Qwen3 (dense): an RMS norm on every query and key head, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.window import uniform_window

architectures = ("Qwen3ForCausalLM",)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config, head_dim=128)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias = read(bool, config, "attention_bias", False)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(
            index,
            sizes.hidden,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            cos_sin,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm_eps=sizes.eps,
        )
        return DecoderLayer(attention, GatedMLP(sizes.hidden, sizes.intermediate), sizes.hidden, sizes.eps)

    return DecoderStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings", False),
        sliding_window=uniform_window(config, sizes.layers),
    )
