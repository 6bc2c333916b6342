"""DeepSeekMoE, the first generation: plain attention, experts chosen by softmax, shared ones without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import later_layers, top_k_rule

architectures = ("DeepseekForCausalLM",)
defaults = {  # as its own config class has them
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "moe_intermediate_size": 1407,
    "num_experts_per_tok": None,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "norm_topk_prob": False,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "scoring_func": ("softmax", None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, bias = Sizes.read(config), read(bool, config, "attention_bias")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    sparse: set[int] = set()
    if config["n_routed_experts"] is not None:
        every = read_positive(config, "moe_layer_freq")
        sparse = {index for index in later_layers(config, sizes.layers) if index % every == 0}
    inner = read_positive(config, "moe_intermediate_size")

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index not in sparse:
            return GatedMLP(sizes.hidden, sizes.intermediate)
        router = Router(sizes.hidden, top_k_rule(config, "n_routed_experts"))
        return MixtureOfExperts(sizes.hidden, inner, router, shared=inner * read_count(config, "n_shared_experts", 0))

    def layer(index: int) -> SparseLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias)
        return SparseLayer(attention, mlp(index), sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
