"""HyperCLOVA X: Granite whose layers norm what they add, if they are told to, and whose logits are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import OuterNormLayer, ScaledLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Naming, Sizes

architectures = ("HyperCLOVAXForCausalLM",)
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
    "attention_multiplier": None,
    "use_post_norm": True,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
POST_NORMS = {
    "post_attention_layernorm": "post_norm1",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_norm2",
}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, mlp_bias = read(bool, config, "attention_bias"), read(bool, config, "mlp_bias")
    scale = read(float, config, "attention_multiplier", sizes.head_dim**-0.5)
    added, has_post_norms = read(float, config, "residual_multiplier"), read(bool, config, "use_post_norm")

    def norms() -> tuple[RMSNorm, RMSNorm]:
        return RMSNorm(sizes.hidden, sizes.eps), RMSNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> OuterNormLayer | ScaledLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, scale=scale)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act, bias=mlp_bias)
        if has_post_norms:
            return OuterNormLayer(attention, mlp, before=norms(), after=norms(), scale=added)
        return ScaledLayer(attention, mlp, sizes.hidden, sizes.eps, added)

    return DecoderStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        naming=Naming(parts=POST_NORMS if has_post_norms else {}),
        logits=Logits(scale=read(float, config, "logits_scaling")),
        input_scale=read(float, config, "embedding_multiplier"),
    )
