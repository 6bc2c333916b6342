"""Youtu-LLM: latent attention in a dense decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.block import DecoderLayer
from quire.layers.mlp import GatedMLP
from quire.models.base import DecoderStack, Sizes
from quire.models.latent.reading import latent_attention

architectures = ("YoutuForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "rope_interleave": True,
    "attention_bias": False,
    "head_dim": None,  # this one and the next follow from others
    "qk_head_dim": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
fixed = {"mlp_bias": (False, None), "is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    attention = latent_attention(config, sizes, max_positions, interleaved=read(bool, config, "rope_interleave"))

    def layer(index: int) -> DecoderLayer:
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return DecoderLayer(attention(index), mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
