"""OLMo 1: layer norms without weights, queries, keys and values clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes

architectures = ("OlmoForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "clip_qkv": None,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read({**config, "eps": 1e-5}, "eps")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, act = read(bool, config, "attention_bias"), read(str, config, "hidden_act")
    clip = read(float, config, "clip_qkv", None)

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps, weight=False, bias=False)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(
            index,
            *sizes.attention,
            cos_sin,
            qkv_bias=bias,
            out_bias=bias,
            clip=clip,
        )
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), norm=norm())
