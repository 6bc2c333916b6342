"""Nemotron-H and Nemotron 3: layers of one thing each, Mamba-2, attention without positions, a feed-forward layer, or
experts without gates, which may see a projection of the stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.experts import ExpertNames, Gate, MixtureOfExperts, Router
from quire.layers.mlp import MLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.block import MixerLayer
from quire.layers.recurrent.mamba2 import GatedNorm, Mamba2, Mamba2Sizes
from quire.layers.rotary import no_rotation
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.hybrid.reading import kinds_of_layers
from quire.models.moe.reading import grouped_rule

architectures = ("NemotronHForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 131072,
    "hidden_size": 4096,
    "layers_block_type": None,
    "hybrid_override_pattern": None,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_min": 0.001,
    "tie_word_embeddings": False,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,  # of layers that are left out
}
fixed = {
    "mamba_hidden_act": ("silu", "swish"),
    "mamba_proj_bias": (False, None),
    "sliding_window": (None,),
    "n_shared_experts": (1, None),
    "is_encoder_decoder": (False, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "mamba_num_heads", "n_groups")
aliases = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min", "layer_types": "layers_block_type",
}  # fmt: skip
KINDS = {
    "linear_attention": "mamba", "mamba": "mamba", "M": "mamba", "full_attention": "attention",
    "attention": "attention", "*": "attention", "mlp": "mlp", "-": "mlp", "moe": "moe", "E": "moe",
}  # fmt: skip


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    kinds = read_kinds(config)
    hidden, eps = read_positive(config, "hidden_size"), read(float, config, "layer_norm_epsilon")
    sizes = Sizes.read({**config, "num_hidden_layers": len(kinds)}, eps="layer_norm_epsilon")
    bias, groups = read(bool, config, "use_bias"), read_positive(config, "n_groups")
    states = Mamba2Sizes(
        hidden=hidden, heads=read_positive(config, "mamba_num_heads"), head_dim=read_positive(config, "mamba_head_dim"),
        groups=groups, state=read_positive(config, "ssm_state_size"), taps=read_count(config, "conv_kernel", least=2),
        eps=eps, limit=(read(float, config, "time_step_min"), float("inf")), bias=bias, out_bias=bias,
        conv_bias=read(bool, config, "use_conv_bias"),
    )  # fmt: skip
    if states.heads % groups:
        raise ConfigError(
            f"config.json: mamba_num_heads={states.heads} is no multiple of n_groups={groups}", "n_groups"
        )
    still = no_rotation(max_positions, sizes.head_dim)
    act, mlp_bias = read(str, config, "mlp_hidden_act"), read(bool, config, "mlp_bias")

    def layer(index: int) -> MixerLayer:
        mixer: Mamba2 | Attention | MLP | MixtureOfExperts
        if kinds[index] == "mamba":
            mixer = Mamba2(index, states, GatedNorm(states.inner, eps, groups=groups))
        elif kinds[index] == "attention":
            mixer = Attention(index, *sizes.attention, still)
        elif kinds[index] == "moe":
            mixer = _experts(config, hidden)
        else:
            mixer = MLP(hidden, sizes.intermediate, act, bias=mlp_bias, key="mlp_hidden_act")
        return MixerLayer(mixer, hidden, eps)

    return DecoderStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        norm=RMSNorm(hidden, eps),
        naming=Naming(trunk={"embed_tokens": "embeddings", "norm": "norm_f"}, prefix="backbone.", unused=r"^mtp\."),
    )


def _experts(config: Mapping[str, Any], hidden: int) -> MixtureOfExperts:
    """Raises ConfigError for an activation that experts cannot have."""
    act = read(str, config, "mlp_hidden_act")
    if act != "relu2":
        raise ConfigError(
            f"config.json: experts without gates have mlp_hidden_act=relu2, got {act!r}", "mlp_hidden_act"
        )
    bias, latent = read(bool, config, "mlp_bias"), config["moe_latent_size"]
    return MixtureOfExperts(
        hidden,
        read_positive(config, "moe_intermediate_size"),
        Router(hidden, grouped_rule(config, "n_routed_experts"), correction="e_score_correction_bias"),
        names=ExpertNames(all_gate_up="up_proj"),
        shared=read_positive(config, "moe_shared_expert_intermediate_size"),
        shared_bias=bias,
        gate=Gate(squared=True),
        latent=None if latent is None else read_positive(config, "moe_latent_size"),
        latent_bias=bias,
    )


def read_kinds(config: Mapping[str, Any]) -> list[str]:
    """Of the layers, as a list or, in older files, a letter each. Raises ConfigError for what is neither."""
    if config["layers_block_type"] is not None:
        return kinds_of_layers(config, "layers_block_type", KINDS, None)
    pattern = config["hybrid_override_pattern"]
    letters = {"hybrid_override_pattern": list(pattern) if isinstance(pattern, str) else pattern}
    if pattern is None:
        letters = {"hybrid_override_pattern": ["M", "E", "*", "-"]}
    return kinds_of_layers(letters, "hybrid_override_pattern", KINDS, None)
