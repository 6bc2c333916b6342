"""Gemma 1: norms whose weights are added to 1, scaled embeddings, a gate of GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.embedding import rounded
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes

architectures = ("GemmaForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "attention_bias": False,
}
fixed = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, act = read(bool, config, "attention_bias"), read(str, config, "hidden_act")

    def norm() -> RMSNorm:
        return RMSNorm(sizes.hidden, sizes.eps, plus_one=True)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    tied = read(bool, config, "tie_word_embeddings")
    return DecoderStack(sizes, layer, tied=tied, norm=norm(), embedding_scale=rounded(sizes.hidden**0.5))
