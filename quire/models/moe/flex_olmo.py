"""FlexOlmo: OLMoE's experts, with OLMo 2's norms behind both halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention, QKNorm
from quire.layers.experts import MixtureOfExperts, Router, SparseOuterNormLayer
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import SparseStack, top_k_rule

architectures = ("FlexOlmoForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 100352,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "num_experts": 7,
    "num_experts_per_tok": 5,
    "norm_topk_prob": False,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
rotary = {"rope_theta": 500000.0}
aliases = {"num_local_experts": "num_experts"}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, rule = read(bool, config, "attention_bias"), top_k_rule(config, "num_experts")

    def norm(size: int = sizes.hidden) -> RMSNorm:
        return RMSNorm(size, sizes.eps)

    def layer(index: int) -> SparseOuterNormLayer:
        q, k = norm(sizes.heads * sizes.head_dim), norm(sizes.kv_heads * sizes.head_dim)
        attention = Attention(
            index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, qk_norm=QKNorm(q, k, on="width")
        )
        mlp = MixtureOfExperts(sizes.hidden, sizes.intermediate, Router(sizes.hidden, rule))
        return SparseOuterNormLayer(attention, mlp, after=(norm(), norm()))

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
