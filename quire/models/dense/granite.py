"""Granite 3: Llama with numbers that embeddings, attention, what layers add and logits are multiplied by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import ScaledLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Sizes

architectures = ("GraniteForCausalLM",)
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
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, mlp_bias = read(bool, config, "attention_bias"), read(bool, config, "mlp_bias")
    scale, added = read(float, config, "attention_multiplier"), read(float, config, "residual_multiplier")

    def layer(index: int) -> ScaledLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, scale=scale)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act, bias=mlp_bias)
        return ScaledLayer(attention, mlp, sizes.hidden, sizes.eps, added)

    return DecoderStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        logits=Logits.divided(config, "logits_scaling"),
        input_scale=read(float, config, "embedding_multiplier"),
    )
