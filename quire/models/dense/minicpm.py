"""MiniCPM 1, 2 and 4: Llama with embeddings, what layers add, and logits scaled by their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.block import ScaledLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Sizes

architectures = ("MiniCPMForCausalLM",)
defaults = {  # as its own config class has them
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
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "scale_emb": 1.0,
    "scale_depth": 1.0,
    "dim_model_base": 1,
}
fixed = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "attention_bias": (False, None),
    "sparse_config": (None,),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    added = read(float, config, "scale_depth") / sizes.layers**0.5

    def layer(index: int) -> ScaledLayer:
        attention = Attention(index, *sizes.attention, cos_sin)
        return ScaledLayer(
            attention, GatedMLP(sizes.hidden, sizes.intermediate, act=act), sizes.hidden, sizes.eps, added
        )

    return DecoderStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        logits=Logits(scale=read_positive(config, "dim_model_base") / sizes.hidden),
        embedding_scale=read(float, config, "scale_emb"),
    )
