"""Mamba: no attention at all, a state of each channel instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.recurrent.block import MixerLayer
from quire.layers.recurrent.mamba import Mamba, MambaSizes, PlainNorm
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.hybrid.reading import rank_of_steps

architectures = ("MambaForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 50280,
    "hidden_size": 768,
    "intermediate_size": None,
    "num_hidden_layers": 32,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "time_step_rank": "auto",
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
fixed = {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False, None)}
shared = ("hidden_size",)


def build(config: Mapping[str, Any], max_positions: int, norm_eps: float | None = None) -> DecoderStack:  # noqa: ARG001
    """norm_eps: of norms of steps, B and C; None: there are none."""
    hidden, eps = read_positive(config, "hidden_size"), read(float, config, "layer_norm_epsilon")
    inner = read_positive(config, "expand") * hidden
    if config["intermediate_size"] not in (None, inner):
        told = config["intermediate_size"]
        raise ConfigError(
            f"config.json: intermediate_size={told} is not expand * hidden_size = {inner}", "intermediate_size"
        )
    sizes = MambaSizes(
        hidden=hidden, inner=inner, state=read_positive(config, "state_size"),
        rank=rank_of_steps(config, "time_step_rank"), taps=read_count(config, "conv_kernel", least=2),
        bias=read(bool, config, "use_bias"), conv_bias=read(bool, config, "use_conv_bias"),
    )  # fmt: skip
    names = ("dt_layernorm", "b_layernorm", "c_layernorm") if norm_eps is not None else ()

    def layer(index: int) -> MixerLayer:
        norms = tuple((name, PlainNorm(norm_eps or 0.0)) for name in names)
        return MixerLayer(Mamba(index, sizes, norms), hidden, eps)

    return DecoderStack(
        Sizes.without_attention(config, eps),
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        naming=Naming(trunk={"embed_tokens": "embeddings", "norm": "norm_f"}, prefix="backbone."),
    )
