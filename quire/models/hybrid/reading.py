"""What families with states read of config.json alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.layers.recurrent.delta_net import DeltaSizes
from quire.layers.recurrent.mamba2 import Mamba2Sizes

_INFINITE = ("Infinity", "inf", {"__float__": "Infinity"})  # as files spell it


def step_limit(config: Mapping[str, Any], key: str = "time_step_limit") -> tuple[float, float]:
    """What steps in time are clamped to. Raises ConfigError for no two numbers, the first no larger."""
    value = config[key]
    if value is None:
        return 0.0, math.inf
    if isinstance(value, list | tuple) and len(value) == 2:
        ends = [math.inf if end in _INFINITE else end for end in value]
        if all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends) and ends[0] <= ends[1]:
            return float(ends[0]), float(ends[1])
    raise ConfigError(f"config.json: {key} must be two numbers, the lower one first, got {shown(value)}", key)


def mamba2_sizes(config: Mapping[str, Any], *, inner: int | None = None, out_bias: bool | None = None) -> Mamba2Sizes:
    """As Bamba's config says them. inner: None: `mamba_expand` times the hidden size. out_bias: None: as that of in.

    Raises ConfigError for sizes that do not go together.
    """
    hidden, heads = read_positive(config, "hidden_size"), read_positive(config, "mamba_n_heads")
    groups, told = read_positive(config, "mamba_n_groups"), config["mamba_d_head"]
    inner = read_positive(config, "mamba_expand") * hidden if inner is None else inner
    head_dim = inner // heads if told == "auto" else read_positive(config, "mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        raise ConfigError(
            f"config.json: mamba_n_heads={heads} of mamba_d_head={shown(told)} in mamba_n_groups={groups} do not make "
            f"{inner}",
            "mamba_n_heads",
        )
    bias = read(bool, config, "mamba_proj_bias")
    return Mamba2Sizes(
        hidden=hidden, heads=heads, head_dim=head_dim, groups=groups, state=read_positive(config, "mamba_d_state"),
        taps=read_count(config, "mamba_d_conv", least=2), eps=read(float, config, "rms_norm_eps"),
        limit=step_limit(config), bias=bias, out_bias=bias if out_bias is None else out_bias,
        conv_bias=read(bool, config, "mamba_conv_bias"),
    )  # fmt: skip


def kinds_of_layers(config: Mapping[str, Any], key: str, known: Mapping[str, str], layers: int | None) -> list[str]:
    """A list with an entry for each layer, by the names that it has here. layers: None: as many as there are.

    Raises ConfigError for a list of another length, and for a name that is not known.
    """
    kinds = config[key]
    if not isinstance(kinds, list) or not kinds or (layers is not None and len(kinds) != layers):
        raise ConfigError(f"config.json: {key} must be a list with an entry for each layer, got {shown(kinds)}", key)
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise ConfigError(f"config.json: {key} may hold {', '.join(known)}, got {shown(kind)}", key)
    return [known[kind] for kind in kinds]


def delta_sizes(config: Mapping[str, Any]) -> DeltaSizes:
    """Of layers with the gated delta rule, as Qwen3-Next's config says them. Raises ConfigError for what cannot be."""
    key_heads, heads = (read_positive(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if heads % key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads={heads} is no multiple of linear_num_key_heads={key_heads}",
            "linear_num_value_heads",
        )
    return DeltaSizes(
        hidden=read_positive(config, "hidden_size"), key_heads=key_heads, heads=heads,
        key_dim=read_positive(config, "linear_key_head_dim"), value_dim=read_positive(config, "linear_value_head_dim"),
        taps=read_count(config, "linear_conv_kernel_dim", least=2), eps=read(float, config, "rms_norm_eps"),
    )  # fmt: skip


def rank_of_steps(config: Mapping[str, Any], key: str) -> int:
    """What Mamba's steps in time are made of: "auto" is a sixteenth of the hidden size."""
    return -(-read_positive(config, "hidden_size") // 16) if config[key] == "auto" else read_positive(config, key)
