"""Mamba-2: no attention at all, a state of each head instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.recurrent.block import MixerLayer
from quire.layers.recurrent.mamba2 import GatedNorm, Mamba2, Mamba2Sizes
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.hybrid.reading import step_limit

architectures = ("Mamba2ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "expand": 2,
    "conv_kernel": 4,
    "n_groups": 8,
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "time_step_limit": (0.0, 1e999),
    "tie_word_embeddings": False,
}
fixed = {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False, None)}
shared = ("num_heads", "n_groups")
NAMES = {"embed_tokens": "embeddings", "norm": "norm_f"}


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:  # noqa: ARG001
    heads, head_dim = read_positive(config, "num_heads"), read_positive(config, "head_dim")
    hidden, eps = read_positive(config, "hidden_size"), read(float, config, "layer_norm_epsilon")
    inner, groups = read_positive(config, "expand") * hidden, read_positive(config, "n_groups")
    if inner != heads * head_dim or heads % groups:
        raise ConfigError(
            f"config.json: hidden_size * expand = {inner} must be num_heads={heads} * head_dim={head_dim}, and "
            f"num_heads a multiple of n_groups={groups}",
            "num_heads",
        )
    bias = read(bool, config, "use_bias")
    sizes = Mamba2Sizes(
        hidden=hidden, heads=heads, head_dim=head_dim, groups=groups, state=read_positive(config, "state_size"),
        taps=read_count(config, "conv_kernel", least=2), eps=eps, limit=step_limit(config),
        bias=bias, out_bias=bias, conv_bias=read(bool, config, "use_conv_bias"),
    )  # fmt: skip

    def layer(index: int) -> MixerLayer:
        return MixerLayer(Mamba2(index, sizes, GatedNorm(inner, eps)), hidden, eps)

    return DecoderStack(
        Sizes.without_attention(config, eps),
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        naming=Naming(trunk=NAMES, prefix="backbone."),
    )
