"""Bamba: Mamba-2, and attention in a few layers; behind either a feed-forward layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.layers.attention import Attention
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.block import HybridLayer
from quire.layers.recurrent.mamba2 import GatedNorm, Mamba2
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.hybrid.reading import mamba2_sizes

architectures = ("BambaForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "attn_layer_indices": None,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, 1e999),
}
fixed = {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "mamba_n_heads", "mamba_n_groups")
rotary = {"partial_rotary_factor": 0.5}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, states = Sizes.read(config), mamba2_sizes(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, mlp_bias = read(bool, config, "attention_bias"), read(bool, config, "mlp_bias")
    attends = config["attn_layer_indices"] or []
    if not isinstance(attends, list) or not all(type(number) is int for number in attends):
        raise ConfigError(
            f"config.json: attn_layer_indices must be a list of layers' numbers, got {shown(attends)}",
            "attn_layer_indices",
        )

    def layer(index: int) -> HybridLayer:
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, bias=mlp_bias)
        norms = (RMSNorm(sizes.hidden, sizes.eps), RMSNorm(sizes.hidden, sizes.eps))
        mixer: tuple[str, Attention | Mamba2]
        if index in attends:
            mixer = "self_attn", Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias)
        else:
            mixer = "mamba", Mamba2(index, states, GatedNorm(states.inner, sizes.eps))
        named = (("input_layernorm", norms[0]), ("pre_ff_layernorm", norms[1]))
        return HybridLayer(mixer, ("feed_forward", mlp), named)

    naming = Naming(trunk={"norm": "final_layernorm"})
    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), naming=naming)
