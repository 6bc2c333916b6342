"""MiniMax-Text-01: lightning attention in most layers, attention in some, experts behind either; what each half adds to
is what it has seen, behind the norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.experts import ExpertNames, MixtureOfExperts, Router
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.block import NormedSumLayer
from quire.layers.recurrent.lightning import LightningAttention
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.hybrid.reading import kinds_of_layers
from quire.models.moe.reading import SparseStack, top_k_rule

architectures = ("MiniMaxForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": None,
    "block_size": 256,  # of transformers' own way to compute it
    "router_jitter_noise": 0.0,  # of training
    "full_attn_alpha_factor": 1.0,
    "full_attn_beta_factor": 1.0,
    "linear_attn_alpha_factor": 1.0,
    "linear_attn_beta_factor": 1.0,
    "mlp_alpha_factor": 1.0,
    "mlp_beta_factor": 1.0,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "sliding_window": (None,),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
aliases = {"num_experts": "num_local_experts"}
rotary = {"rope_theta": 1000000.0}
KINDS = {"linear_attention": "linear", "full_attention": "full"}
NAMES = ExpertNames(gate="w1", up="w3", down="w2")
TABLES = r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, rule = Sizes.read(config), top_k_rule(config, "num_local_experts", renormalize=True)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    kinds = ["linear" if index % 2 else "full" for index in range(sizes.layers)]
    if config["layer_types"] is not None:
        kinds = kinds_of_layers(config, "layer_types", KINDS, sizes.layers)
    scales = {kind: _pair(config, f"{kind}_attn") for kind in ("linear", "full")}

    def layer(index: int) -> NormedSumLayer:
        mixer: Attention | LightningAttention = Attention(index, *sizes.attention, cos_sin)
        if kinds[index] == "linear":
            depth = index / (sizes.layers - 1 + 1e-5)
            mixer = LightningAttention(index, sizes.hidden, sizes.heads, sizes.head_dim, depth)
        experts = MixtureOfExperts(sizes.hidden, sizes.intermediate, Router(sizes.hidden, rule), names=NAMES)
        norms = (RMSNorm(sizes.hidden, sizes.eps), RMSNorm(sizes.hidden, sizes.eps))
        return NormedSumLayer(mixer, experts, norms, scales[kinds[index]], _pair(config, "mlp"))

    return SparseStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        naming=Naming(unused=TABLES),
        renamed={".block_sparse_moe.": ".mlp."},
    )


def _pair(config: Mapping[str, Any], half: str) -> tuple[float, float]:
    return read(float, config, f"{half}_alpha_factor"), read(float, config, f"{half}_beta_factor")
