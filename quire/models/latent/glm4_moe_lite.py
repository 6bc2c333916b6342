"""GLM-4.7-Flash: GLM-4.5's experts behind latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.layers.experts import SparseLayer
from quire.models.base import DecoderStack, Sizes
from quire.models.latent.reading import feed_forward, latent_attention
from quire.models.moe.reading import SparseStack, grouped_rule

architectures = ("Glm4MoeLiteForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "hidden_act": "silu",
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_interleave": True,
    "attention_bias": False,
    "qk_head_dim": None,  # follows from others
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "mlp_layer_types": None,
    "num_mtp_layers": None,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "topk_method": ("noaux_tc", None),
    "first_k_dense_replace": (1, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
aliases = {
    "head_dim": "qk_rope_head_dim",
    "num_local_experts": "n_routed_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}
shared = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    attention = latent_attention(config, sizes, max_positions, interleaved=read(bool, config, "rope_interleave"))
    mlp = feed_forward(config, sizes, grouped_rule(config, "n_routed_experts"), _sparse(config, sizes.layers))

    def layer(index: int) -> SparseLayer:
        return SparseLayer(attention(index), mlp(index), sizes.hidden, sizes.eps)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))


def _sparse(config: Mapping[str, Any], layers: int) -> set[int]:
    """Numbers of the layers that have experts: those that `mlp_layer_types` says, by default all but the first.

    Raises ConfigError for a list that does not say it of every layer.
    """
    kinds = config["mlp_layer_types"]
    if kinds is None:
        return set(range(1, layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not {"dense", "sparse"}.issuperset(map(str, kinds)):
        raise ConfigError(
            f"config.json: mlp_layer_types must be a list of {layers} times dense or sparse, got {shown(kinds)}",
            "mlp_layer_types",
        )
    return {index for index, kind in enumerate(kinds) if kind == "sparse"}
