"""K-EXAONE: windows without positions elsewhere, norms of query and key heads, experts chosen by sigmoids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router, SparseLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.moe.reading import SparseStack, grouped_rule, typed_layers
from quire.models.windowed.exaone4 import seen_by

architectures = ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM")
defaults = {  # as transformers has them
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
    "mlp_layer_types": None,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
aliases = {"num_local_experts": "num_experts"}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
CORRECTION = "e_score_correction_bias"
RENAMED = {f".mlp.{CORRECTION}": f".mlp.gate.{CORRECTION}"}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    tables, windows = seen_by(config, sizes, rotary_table(config, sizes.head_dim, max_positions))
    rule, inner = grouped_rule(config, "num_experts"), read_positive(config, "moe_intermediate_size")
    shared_inner = inner * read_positive(config, "num_shared_experts")
    sparse = typed_layers(config, sizes.layers, read_positive(config, "first_k_dense_replace", 0))

    def mlp(index: int) -> GatedMLP | MixtureOfExperts:
        if index not in sparse:
            return GatedMLP(sizes.hidden, sizes.intermediate)
        return MixtureOfExperts(
            sizes.hidden, inner, Router(sizes.hidden, rule, correction=CORRECTION), shared=shared_inner
        )

    def layer(index: int) -> SparseLayer:
        attention = Attention(index, *sizes.attention, tables[index], window=windows[index], qk_norm_eps=sizes.eps)
        return SparseLayer(attention, mlp(index), sizes.hidden, sizes.eps)

    return SparseStack(
        sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=Naming(unused=r"^mtp\."), renamed=RENAMED
    )
