"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts chosen by softmax, and a gated one for every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.layers.attention import Attention
from quire.layers.dual_chunk import rotary_in_chunks
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.mlp import GatedMLP
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import sparse_layers, top_k_rule
from quire.models.window import layer_windows

architectures = ("Qwen2MoeForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "dual_chunk_attention_config": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
aliases = {"num_local_experts": "num_experts"}
shared = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin, dual = rotary_in_chunks(config, sizes.head_dim, max_positions)
    windows = _windows(config, sizes.layers, max_positions)
    bias = read(bool, config, "qkv_bias")
    rule, inner = top_k_rule(config, "num_experts"), read_positive(config, "moe_intermediate_size")
    sparse, shared_inner = sparse_layers(config, sizes.layers), read_positive(config, "shared_expert_intermediate_size")

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index not in sparse:
            return GatedMLP(sizes.hidden, sizes.intermediate)
        router = Router(sizes.hidden, rule)
        return MixtureOfExperts(
            sizes.hidden,
            inner,
            router,
            shared=shared_inner,
            shared_name="shared_expert",
            shared_gate="shared_expert_gate",
        )

    def layer(index: int) -> SparseLayer:
        attention = Attention(index, *sizes.attention, cos_sin, window=windows[index], dual=dual, qkv_bias=bias)
        return SparseLayer(attention, mlp(index), sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))


def _windows(config: Mapping[str, Any], layers: int, max_positions: int) -> list[int | None]:
    """Every other one of the first `max_window_layers`, unless `layer_types` says."""
    on, first = read(bool, config, "use_sliding_window"), read_count(config, "max_window_layers")
    kinds = config["layer_types"]
    if kinds is None:
        kinds = [
            "sliding_attention" if on and index % 2 == 0 and index < first else "full_attention"
            for index in range(layers)
        ]
    window = config["sliding_window"] if on else None
    return layer_windows({**config, "sliding_window": window, "layer_types": kinds}, layers, max_positions)
