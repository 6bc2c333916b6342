"""MiniCPM3: MiniCPM with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.block import ScaledLayer
from quire.layers.mlp import GatedMLP
from quire.models.base import DecoderStack, Logits, Sizes
from quire.models.latent.reading import latent_attention

architectures = ("MiniCPM3ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 73448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,  # this one and the next follow from others
    "qk_head_dim": None,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": None,
    "scale_emb": 12.0,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act, bias = Sizes.read(config), read(str, config, "hidden_act"), read(bool, config, "mlp_bias")
    attention = latent_attention(config, sizes, max_positions, interleaved=False)
    added = read(float, config, "scale_depth", sizes.layers**0.5) / sizes.layers**0.5
    base = read_positive(config, "dim_model_base", sizes.hidden)

    def layer(index: int) -> ScaledLayer:
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, bias=bias, act=act)
        return ScaledLayer(attention(index), mlp, sizes.hidden, sizes.eps, added)

    return DecoderStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        logits=Logits(scale=base / sizes.hidden),
        embedding_scale=read(float, config, "scale_emb"),
    )
