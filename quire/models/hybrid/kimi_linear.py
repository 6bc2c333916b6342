"""Kimi Linear: Kimi Delta Attention in three layers of four, latent attention without positions in the others, experts
behind either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive, read_section
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.layers.latent import LatentAttention
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.block import HybridLayer
from quire.layers.recurrent.kimi_delta import KimiDelta, KimiDeltaSizes
from quire.layers.rotary import no_rotation
from quire.models.base import DecoderStack, Sizes
from quire.models.hybrid.reading import kinds_of_layers
from quire.models.latent.reading import feed_forward, latent_shape
from quire.models.moe.reading import SparseStack, grouped_rule, typed_layers

architectures = ("KimiLinearForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "head_dim": None,  # this one and the next follow from others
    "qk_head_dim": None,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": None,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": None,
    "mlp_layer_types": None,
    "first_k_dense_replace": None,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
fixed = {
    "hidden_act": ("silu", "swish"),
    "mla_use_nope": (True, None),
    "moe_router_activation_func": ("sigmoid", None),
    "use_grouped_topk": (True, None),
    "moe_layer_freq": (1, None),
    "num_nextn_predict_layers": (0, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
}
aliases = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_local_experts": "num_experts", "n_routed_experts": "num_experts", "num_shared_experts": "n_shared_experts",
    "num_experts_per_token": "num_experts_per_tok",
}  # fmt: skip
shared = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "linear_num_heads")
KINDS = {"linear_attention": "linear", "full_attention": "full"}
RENAMED = {
    ".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj.",
    ".forget_gate.f_a_proj.": ".f_a_proj.", ".forget_gate.f_b_proj.": ".f_b_proj.",
}  # fmt: skip


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, linear = Sizes.read(config), read_section(config, "linear_attn_config")
    shape, states = latent_shape(config, sizes), _delta(config, linear)
    still, bias = no_rotation(max_positions, shape.rope), read(bool, config, "attention_bias")
    sparse = typed_layers(config, sizes.layers, read_count(config, "first_k_dense_replace", 1))
    mlp, kinds = feed_forward(config, sizes, grouped_rule(config, "num_experts"), sparse), _kinds(config, linear)

    def layer(index: int) -> HybridLayer:
        mixer: KimiDelta | LatentAttention
        if kinds[index] == "linear":
            mixer = KimiDelta(index, states)
        else:
            mixer = LatentAttention(index, sizes.hidden, shape, still, bias=bias)
        norms = (RMSNorm(sizes.hidden, sizes.eps), RMSNorm(sizes.hidden, sizes.eps))
        named = (("input_layernorm", norms[0]), ("post_attention_layernorm", norms[1]))
        return HybridLayer(("self_attn", mixer), ("mlp", mlp(index)), named)

    return SparseStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), renamed=RENAMED)


def _delta(config: Mapping[str, Any], told: Mapping[str, Any]) -> KimiDeltaSizes:
    """As the section of older files says, or keys of its own."""
    return KimiDeltaSizes(
        hidden=read_positive(config, "hidden_size"),
        heads=read_positive(told, "num_heads", read_positive(config, "linear_num_heads")),
        head_dim=read_positive(told, "head_dim", read_positive(config, "linear_head_dim")),
        taps=read_count(told, "short_conv_kernel_size", read_count(config, "linear_conv_kernel_dim", least=2), least=2),
        eps=read(float, config, "rms_norm_eps"),
    )


def _kinds(config: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    """Of the layers; the section counts them from 1. Raises ConfigError for lists that are not of all layers."""
    layers = read_positive(config, "num_hidden_layers")
    if config["layer_types"] is not None:
        return kinds_of_layers(config, "layer_types", KINDS, layers)
    linear, full = told.get("kda_layers"), told.get("full_attn_layers")
    if linear is None and full is None:
        return ["full" if index and index % 4 == 0 else "linear" for index in range(layers)]
    every = [*linear, *full] if isinstance(linear, list) and isinstance(full, list) else []
    if sorted(every, key=str) != sorted(range(1, layers + 1), key=str) or not isinstance(full, list):
        raise ConfigError(
            f"config.json: kda_layers and full_attn_layers of linear_attn_config must name each of {layers} layers "
            f"once, got {shown(linear)} and {shown(full)}",
            "linear_attn_config",
        )
    return ["full" if index + 1 in full else "linear" for index in range(layers)]
