"""Qwen3-MoE: Qwen3's attention, and experts chosen by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.dual_chunk import rotary_in_chunks
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.mlp import GatedMLP
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import sparse_layers, top_k_rule
from quire.models.window import switched_windows

architectures = ("Qwen3MoeForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "dual_chunk_attention_config": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "moe_intermediate_size": 768,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
aliases = {"num_local_experts": "num_experts"}
_ALL_OR_NONE = {"max_window_layers": 0, "layer_types": None}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin, dual = rotary_in_chunks(config, sizes.head_dim, max_positions)
    windows = switched_windows({**config, **_ALL_OR_NONE}, sizes.layers, max_positions)
    bias = read(bool, config, "attention_bias")
    rule, inner = top_k_rule(config, "num_experts"), read_positive(config, "moe_intermediate_size")
    sparse = sparse_layers(config, sizes.layers)

    def layer(index: int) -> SparseLayer:
        attention = Attention(
            index,
            *sizes.attention,
            cos_sin,
            window=windows[index],
            dual=dual,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm_eps=sizes.eps,
        )
        mlp = (
            MixtureOfExperts(sizes.hidden, inner, Router(sizes.hidden, rule))
            if index in sparse
            else GatedMLP(sizes.hidden, sizes.intermediate)
        )
        return SparseLayer(attention, mlp, sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
