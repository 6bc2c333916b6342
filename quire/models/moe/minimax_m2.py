"""MiniMax-M2: experts chosen by sigmoids, and norms over all of a token's queries and over all of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention, QKNorm
from quire.layers.experts import ExpertNames, MixtureOfExperts, Router, Rule, SparseLayer
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table, table_of
from quire.models.base import DecoderStack, Sizes
from quire.models.moe.reading import SparseStack, chosen

architectures = ("MiniMaxM2ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rotary_dim": None,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "router_jitter_noise": 0.0,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "use_qk_norm": (True, None),
    "qk_norm_type": ("per_layer", None),
    "scoring_func": ("sigmoid", None),
    "use_routing_bias": (True, None),
    "shared_intermediate_size": (0, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
rotary = {"rope_theta": 5000000.0, "partial_rotary_factor": 1.0}
aliases = {"num_experts": "num_local_experts"}
CORRECTION = "e_score_correction_bias"
RENAMED = {".block_sparse_moe.": ".mlp.", f".mlp.{CORRECTION}": f".mlp.gate.{CORRECTION}"}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    """`router_jitter_noise` is of training alone."""
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    if config["rotary_dim"] is not None:  # its own files say so
        cos_sin = table_of(
            config["rope_parameters"], read_positive(config, "rotary_dim"), sizes.head_dim, max_positions
        )
    experts, top_k = chosen(config, "num_local_experts", "num_experts_per_tok")
    rule = Rule(experts, top_k, scoring="sigmoid", renormalize=True)
    names = ExpertNames(gate="w1", up="w3", down="w2")

    def layer(index: int) -> SparseLayer:
        q_norm, k_norm = (RMSNorm(heads * sizes.head_dim, sizes.eps) for heads in (sizes.heads, sizes.kv_heads))
        attention = Attention(index, *sizes.attention, cos_sin, qk_norm=QKNorm(q_norm, k_norm, on="width"))
        router = Router(sizes.hidden, rule, correction=CORRECTION)
        mlp = MixtureOfExperts(sizes.hidden, sizes.intermediate, router, names=names)
        return SparseLayer(attention, mlp, sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), renamed=RENAMED)
