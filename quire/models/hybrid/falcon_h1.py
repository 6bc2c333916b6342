"""Falcon-H1: attention and Mamba-2 side by side in every layer, and numbers that most of it is multiplied by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.layers.attention import Attention
from quire.layers.mlp import GatedMLP
from quire.layers.recurrent.block import BothLayer, Scales
from quire.layers.recurrent.mamba2 import GatedNorm, Mamba2, Mamba2Sizes
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Naming, Sizes
from quire.models.hybrid.reading import mamba2_sizes

architectures = ("FalconH1ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "projectors_bias": False,
    "mlp_bias": False,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "time_step_limit": (0.0, 1e999),
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "ssm_multipliers": None,
    "mlp_multipliers": None,
}
fixed = {"hidden_act": ("silu", "swish"), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "mamba_n_heads", "mamba_n_groups")
SCALES = ("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    inner = None if config["mamba_d_ssm"] is None else read_positive(config, "mamba_d_ssm")
    states = mamba2_sizes(config, inner=inner, out_bias=read(bool, config, "projectors_bias"))
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, mlp_bias = read(bool, config, "attention_bias"), read(bool, config, "mlp_bias")
    gate, down = _numbers(config, "mlp_multipliers", 2)
    attention_in, attention_out, state_in, state_out = (read(float, config, key) for key in SCALES)
    scales = Scales(attention_in, attention_out, state_in, state_out, down)
    by_row = _by_row(states, _numbers(config, "ssm_multipliers", 5))
    scale = sizes.head_dim**-0.5 * read(float, config, "key_multiplier")
    gate_first = not read(bool, config, "mamba_norm_before_gate")

    def layer(index: int) -> BothLayer:
        norm = None
        if read(bool, config, "mamba_rms_norm"):
            norm = GatedNorm(states.inner, sizes.eps, groups=states.groups, gate_first=gate_first)
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias, scale=scale)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, bias=mlp_bias, gate_scale=gate)
        return BothLayer(attention, Mamba2(index, states, norm, scales=by_row), mlp, sizes.hidden, sizes.eps, scales)

    return DecoderStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        naming=Naming(trunk={"norm": "final_layernorm"}),
        logits=Logits(scale=read(float, config, "lm_head_multiplier")),
        embedding_scale=read(float, config, "embedding_multiplier"),
    )


def _numbers(config: Mapping[str, Any], key: str, count: int) -> list[float]:
    """Raises ConfigError for a list of another length, or of something else."""
    told = config[key]
    if told is None:
        return [1.0] * count
    if not isinstance(told, list) or len(told) != count:
        raise ConfigError(f"config.json: {key} must be {count} numbers, got {shown(told)}", key)
    return [read(float, {key: number}, key) for number in told]


def _by_row(states: Mamba2Sizes, numbers: list[float]) -> torch.Tensor | None:
    """What each row of the projection is multiplied by: gate, x, B, C and the steps."""
    if all(number == 1.0 for number in numbers):
        return None
    counts = (states.inner, states.inner, states.shared, states.shared, states.heads)
    return torch.cat(
        [torch.full((count,), number, dtype=torch.float32) for count, number in zip(counts, numbers, strict=True)]
    )
