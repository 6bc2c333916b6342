"""OLMoE: experts chosen by softmax, and norms over all of a token's queries and over all of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention, QKNorm
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import top_k_rule

architectures = ("OlmoeForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "clip_qkv": None,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "sliding_window": (None,),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
aliases = {"num_local_experts": "num_experts"}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, clip = read(bool, config, "attention_bias"), read(float, config, "clip_qkv", None)
    if clip is not None and clip <= 0:
        raise ConfigError(f"config.json: clip_qkv must be > 0, got {clip:g}", "clip_qkv")
    rule = top_k_rule(config, "num_experts")

    def layer(index: int) -> SparseLayer:
        q_norm, k_norm = (RMSNorm(heads * sizes.head_dim, sizes.eps) for heads in (sizes.heads, sizes.kv_heads))
        attention = Attention(
            index,
            *sizes.attention,
            cos_sin,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(q_norm, k_norm, on="width"),
            clip=clip,
        )
        mlp = MixtureOfExperts(sizes.hidden, sizes.intermediate, Router(sizes.hidden, rule))
        return SparseLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
