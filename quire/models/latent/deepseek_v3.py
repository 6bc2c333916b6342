"""DeepSeek-V3, V3.1 and R1, Kimi K2: latent attention, experts chosen by corrected sigmoids among the best groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.layers.experts import SparseLayer
from quire.models.base import DecoderStack, Sizes
from quire.models.latent.reading import feed_forward, latent_attention
from quire.models.moe.reading import SparseStack, grouped_rule, later_layers

architectures = ("DeepseekV3ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_interleave": True,
    "attention_bias": False,
    "head_dim": None,  # this one and the next follow from others
    "qk_head_dim": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "num_mtp_layers": 1,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
aliases = {"num_nextn_predict_layers": "num_mtp_layers", "num_local_experts": "n_routed_experts"}
shared = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    attention = latent_attention(config, sizes, max_positions, interleaved=read(bool, config, "rope_interleave"))
    mlp = feed_forward(config, sizes, grouped_rule(config, "n_routed_experts"), later_layers(config, sizes.layers))

    def layer(index: int) -> SparseLayer:
        return SparseLayer(attention(index), mlp(index), sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
