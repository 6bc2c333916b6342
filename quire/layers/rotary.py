"""Rotary position tables (Su et al., 2021) and the ways to stretch them over longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from quire.foundation.errors import ConfigError


def rotary_table(
    config: Mapping[str, Any], head_dim: int, max_positions: int, layers: str | None = None
) -> torch.Tensor:
    """The table for positions 0 … max_positions - 1: float32 [max_positions, rotary_dim], cos then sin.

    config: the model's config.json as `config/hf_config.py` reads it, rotary settings complete in `rope_parameters`.
    layers: whose settings these are, in families that have kinds of layers.
    Computed in float32 on the CPU, as the models were trained; the result lives on torch's default device.
    Raises ConfigError for settings that do not go with the head, or with so many positions.
    """
    rope = config["rope_parameters"] if layers is None else config["rope_parameters"][layers]
    return table_of(rope, int(head_dim * rope["partial_rotary_factor"]), head_dim, max_positions)


def table_of(rope: Mapping[str, Any], rotary_dim: int, head_dim: int, max_positions: int) -> torch.Tensor:
    """The same for settings of rope_type, rope_theta … whose share of the head is said otherwise."""
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(
            f"config.json: the rotary part of a head (hidden_size / num_attention_heads, or head_dim) must be even and "
            f"in [2, {head_dim}], got {rotary_dim}",
            "head_dim",
        )
    theta: float = rope["rope_theta"]
    frequencies = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, device="cpu").float() / rotary_dim)
    rope = {**rope, "positions_used": max_positions}
    frequencies, scale = _SCALINGS[rope["rope_type"]](frequencies, theta, rope)
    angles = torch.arange(max_positions, device="cpu").float().unsqueeze(1) * frequencies
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=1).to(torch.get_default_device())


def no_rotation(max_positions: int, head_dim: int) -> torch.Tensor:
    """A table that leaves queries and keys as they are, of layers without rotary positions: one line for all."""
    half = max(head_dim // 2, 1)
    return torch.tensor([[1.0] * half + [0.0] * half], dtype=torch.float32).expand(max_positions, -1)


def sharpened_scale(rope: Mapping[str, Any], columns: int) -> float:
    """Of products of queries and keys of so many columns, where not all of them turn (DeepSeek-V2): what YaRN sharpens
    attention by in all columns, `mscale_all_dim`, is here, and the table has the rest."""
    sharpening = _sharpening(rope["factor"], rope["mscale_all_dim"]) if rope.get("mscale_all_dim") else 1.0
    return math.sqrt(1 / columns) * sharpening * sharpening


def position_scales(beta: float, trained: int, max_positions: int, first: int = 0) -> torch.Tensor | None:
    """What queries are multiplied by, float32 [max_positions]: 1 + beta · ln(1 + floor(position / trained)) (Nakanishi,
    2025, as Llama 4 and Ministral 3 have it); None: nothing. first: the number of the first position."""
    if not beta or max_positions + first <= trained:
        return None
    positions = torch.arange(first, first + max_positions, device="cpu").float()
    return (1 + beta * torch.log(1 + torch.floor(positions / trained))).to(torch.get_default_device())


# Each takes the plain frequencies [rotary_dim / 2] in rad/token, their base and the settings; returns the frequencies
# to use and a factor on cos and sin.


def _default(frequencies: torch.Tensor, _theta: float, _rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: torch.Tensor, _theta: float, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Position interpolation (Chen et al., 2023)."""
    return frequencies / rope["factor"], 1.0


def _dynamic(frequencies: torch.Tensor, theta: float, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Plain up to the trained length. Beyond, the frequencies would depend on each request's length, and keys
    already cached would turn wrong as it grows: refused rather than approximated. With an `alpha` (HunYuan) the base is
    stretched once and for all."""
    if rope.get("alpha"):
        dim = 2 * len(frequencies)
        stretched = theta * rope["alpha"] ** (dim / (dim - 2))
        return 1.0 / stretched ** (torch.arange(0, dim, 2, device="cpu").float() / dim), 1.0
    trained = rope["original_max_position_embeddings"]
    if rope["positions_used"] > trained:
        raise ConfigError(
            f"rope_type=dynamic works up to the trained length only: max_model_len must be <= {trained}, "
            f"got {rope['positions_used']}",
            "max_model_len",
        )
    return frequencies, 1.0


def _ntk(frequencies: torch.Tensor, theta: float, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """A larger base, and all columns stretched a bit besides (GTE v1.5); or, with `mixed_b`, each column of its own."""
    factor, half = rope["factor"], len(frequencies)
    mixed: float | None = rope.get("mixed_b")
    if mixed is None:
        dim = 2 * half
        stretched = (theta * factor) ** (torch.arange(0, dim, 2, device="cpu").float() / dim)
        return 1.0 / stretched / factor ** (2 / dim), 1.0
    columns = torch.arange(1, half + 1, device="cpu").float()
    return frequencies / torch.exp(math.log(factor) / half**mixed * columns**mixed), 1.0


def _llama3(frequencies: torch.Tensor, _theta: float, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended by how often they
    turn within the trained length."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * (1 - keep) + frequencies * keep, 1.0


def _longrope(frequencies: torch.Tensor, _theta: float, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al., 2024): a factor for each frequency, of two lists: the short one's serve up to the trained
    length. The longest request that the engine takes says which, for all: keys in the cache are of one kind."""
    trained, factor = rope["original_max_position_embeddings"], rope["factor"]
    which = "long_factor" if rope["positions_used"] > trained else "short_factor"
    if len(rope[which]) != len(frequencies):
        raise ConfigError(
            f"config.json: the rotary {which} must have {len(frequencies)} numbers, got {len(rope[which])}", which
        )
    scale = rope.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return frequencies / torch.tensor(rope[which], device="cpu"), scale


def _yarn(frequencies: torch.Tensor, theta: float, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): stretch the columns that turn less than `beta_slow` times within the trained length,
    keep those that turn more than `beta_fast` times, blend linearly between; sharpen attention to make up for it."""
    trained, factor, dim = rope["original_max_position_embeddings"], rope["factor"], 2 * len(frequencies)

    def column_turning(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = column_turning(rope.get("beta_fast", 32.0))
    last = column_turning(rope.get("beta_slow", 1.0))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    stretch = ((torch.arange(dim // 2, device="cpu").float() - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequencies / factor * stretch + frequencies * (1 - stretch), _yarn_scale(factor, rope)


def _sharpening(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_scale(factor: float, rope: Mapping[str, Any]) -> float:
    given: float | None = rope.get("attention_factor")
    if given is not None:
        return given
    some, all_dims = rope.get("mscale", 0.0), rope.get("mscale_all_dim", 0.0)
    if some and all_dims:
        return _sharpening(factor, some) / _sharpening(factor, all_dims)
    return _sharpening(factor, 1.0)


_Scaling = Callable[[torch.Tensor, float, Mapping[str, Any]], tuple[torch.Tensor, float]]
_SCALINGS: dict[str, _Scaling] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "longrope": _longrope,
    "ntk": _ntk,
    "yarn": _yarn,
}
