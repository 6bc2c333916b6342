"""Jamba: Mamba with norms in most layers, attention without positions in some; behind either a feed-forward layer or
experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.experts import MixtureOfExperts, Router
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.block import HybridLayer
from quire.layers.recurrent.mamba import Mamba, MambaSizes
from quire.layers.rotary import no_rotation
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.hybrid.reading import rank_of_steps
from quire.models.moe.reading import SparseStack, top_k_rule

architectures = ("JambaForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 65536,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
fixed = {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size")
aliases = {"num_local_experts": "num_experts"}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    still = no_rotation(max_positions, sizes.head_dim)
    states = MambaSizes(
        hidden=sizes.hidden, inner=read_positive(config, "mamba_expand") * sizes.hidden,
        state=read_positive(config, "mamba_d_state"), rank=rank_of_steps(config, "mamba_dt_rank"),
        taps=read_count(config, "mamba_d_conv", least=2), bias=read(bool, config, "mamba_proj_bias"),
        conv_bias=read(bool, config, "mamba_conv_bias"),
    )  # fmt: skip
    attends, sparse = (_every(config, kind, sizes.layers) for kind in ("attn", "expert"))
    rule = top_k_rule(config, "num_experts", renormalize=False)

    def norm(size: int) -> RMSNorm:
        return RMSNorm(size, sizes.eps)

    def layer(index: int) -> HybridLayer:
        mlp: GatedMLP | MixtureOfExperts = GatedMLP(sizes.hidden, sizes.intermediate)
        if index in sparse and rule.experts > 1:
            mlp = MixtureOfExperts(sizes.hidden, sizes.intermediate, Router(sizes.hidden, rule))
        mixer: tuple[str, Attention | Mamba]
        if index in attends:
            mixer = "self_attn", Attention(index, *sizes.attention, still)
        else:
            inner = (("dt_layernorm", states.rank), ("b_layernorm", states.state), ("c_layernorm", states.state))
            mixer = "mamba", Mamba(index, states, tuple((name, norm(size)) for name, size in inner))
        named = (("input_layernorm", norm(sizes.hidden)), ("pre_ff_layernorm", norm(sizes.hidden)))
        return HybridLayer(mixer, ("feed_forward", mlp), named)

    return SparseStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        naming=Naming(trunk={"norm": "final_layernorm"}),
        renamed={".feed_forward.router.": ".feed_forward.gate."},
    )


def _every(config: Mapping[str, Any], kind: str, layers: int) -> set[int]:
    """Numbers of the layers that are of a kind. Raises ConfigError for an offset beyond its period."""
    period, offset = read_positive(config, f"{kind}_layer_period"), read_count(config, f"{kind}_layer_offset")
    if offset >= period:
        key = f"{kind}_layer_offset"
        raise ConfigError(f"config.json: {key}={offset} must be < {kind}_layer_period={period}", key)
    return set(range(offset, layers, period))
