"""Qwen 1: Qwen2 without shared key heads, by other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("QWenLMHeadModel",)
defaults = {  # as its own config class has them
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "max_position_embeddings": 8192,
    "layer_norm_epsilon": 1e-06,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "seq_length": 8192,
    "no_bias": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
aliases = {"kv_channels": "head_dim", "rotary_emb_base": "rope_theta"}
shared = ("num_attention_heads", "intermediate_size")
NAMING = Naming(
    parts={
        "embed_tokens": "wte",
        "layers": "h",
        "input_layernorm": "ln_1",
        "self_attn": "attn",
        "o_proj": "c_proj",
        "post_attention_layernorm": "ln_2",
        "gate_proj": "w2",
        "up_proj": "w1",
        "down_proj": "c_proj",
        "norm": "ln_f",
    },
    prefix="transformer.",
    unused=r"\.rotary_emb\.inv_freq$",
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config, "layer_norm_epsilon")
    sizes = replace(sizes, intermediate=sizes.intermediate // 2)  # that of gate and up together
    trained, is_stretched = read_positive(config, "seq_length"), False
    for key in ("use_dynamic_ntk", "use_logn_attn"):
        is_stretched |= read(bool, config, key)
    if is_stretched and max_positions > trained:
        raise ConfigError(
            f"use_dynamic_ntk and use_logn_attn change with a text's length beyond seq_length={trained}: "
            f"max_model_len must be <= {trained}, got {max_positions}",
            "max_model_len",
        )
    cos_sin, bias = rotary_table(config, sizes.head_dim, max_positions), not read(bool, config, "no_bias")

    def layer(index: int) -> DecoderLayer:
        qkv = Linear.qkv(*sizes.attention, bias=True, fused="c_attn")
        attention = Attention(index, *sizes.attention, cos_sin, qkv=qkv, out_bias=bias)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, bias=bias)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=NAMING)
