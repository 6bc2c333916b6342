"""GLM-4-0414: GLM-4 whose layers norm what they add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import OuterNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("Glm4ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": True,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
rotary = {"partial_rotary_factor": 0.5}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMING = Naming(
    parts={
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias = read(bool, config, "attention_bias")

    def norms() -> tuple[RMSNorm, RMSNorm]:
        return RMSNorm(sizes.hidden, sizes.eps), RMSNorm(sizes.hidden, sizes.eps)

    def layer(index: int) -> OuterNormLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, interleaved=True)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act, fused="gate_up_proj")
        return OuterNormLayer(attention, mlp, before=norms(), after=norms())

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=NAMING)
