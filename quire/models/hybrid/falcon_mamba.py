"""FalconMamba: Mamba, whose steps, B and C are normed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.models.base import DecoderStack
from quire.models.hybrid import mamba

architectures = ("FalconMambaForCausalLM",)
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
    "mixer_rms_eps": 1e-6,
    "tie_word_embeddings": True,
}
fixed = {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False, None)}
shared = ("hidden_size",)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    return mamba.build(config, max_positions, read(float, config, "mixer_rms_eps"))
