"""Qwen3 (dense): an RMS norm on every query and key head, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.dual_chunk import rotary_in_chunks
from quire.layers.mlp import GatedMLP
from quire.models.base import DecoderStack, Sizes
from quire.models.window import switched_windows

architectures = ("Qwen3ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "dual_chunk_attention_config": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin, dual = rotary_in_chunks(config, sizes.head_dim, max_positions)
    windows = switched_windows(config, sizes.layers, max_positions)
    bias = read(bool, config, "attention_bias")

    def layer(index: int) -> DecoderLayer:
        attention = Attention(
            index,
            sizes.hidden,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            cos_sin,
            window=windows[index],
            dual=dual,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm_eps=sizes.eps,
        )
        return DecoderLayer(attention, GatedMLP(sizes.hidden, sizes.intermediate), sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
