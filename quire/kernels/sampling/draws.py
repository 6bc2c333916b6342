"""What sampling in torch is made of, whatever the device: the random number of a place, and inverse CDF."""

from __future__ import annotations

import math

import torch

from quire.kernels.sampling.state import Column

LARGEST = torch.finfo(torch.float32).max
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def seed_key(seed: int) -> tuple[int, int]:
    """The 64-bit key of a seed as two int32 (low, high): one round of splitmix64 (Steele et al., 2014)."""
    z = (seed + _GOLDEN) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * _MIX_1) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * _MIX_2) & 0xFFFFFFFFFFFFFFFF
    z ^= z >> 31
    return _signed(z & 0xFFFFFFFF, 32), _signed(z >> 32, 32)


def uniform(key_low: torch.Tensor, key_high: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Output number `length` of splitmix64 started at the key: float32 in [0, 1), a multiple of 2**-24. All [n]."""
    z = (key_high.long() << 32) | (key_low.long() & 0xFFFFFFFF)
    z = z + lengths.long() * _signed(_GOLDEN, 64)  # int64 wraps
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1, 64)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2, 64)
    z = z ^ _shift(z, 31)
    return _shift(z, 40).float() * 2.0**-24


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift(z: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right of int64."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def floats(rows: torch.Tensor, column: Column) -> torch.Tensor:
    return rows[:, column].contiguous().view(torch.float32)


def clean(logits: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(logits, nan=-math.inf, posinf=LARGEST, neginf=-math.inf)


def pick(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place where the running sum passes `target`, and what is left of the target there.

    weights: [n, m] >= 0; target: [n]. A place of weight 0 is only taken if all are 0.
    """
    running = weights.cumsum(-1)
    passed = (running > target.unsqueeze(1)) & (weights > 0)
    # Rounding may leave the target past the end: then the last place that has weight.
    last = (weights.shape[1] - 1 - (weights > 0).int().flip(1).argmax(1)) * (weights > 0).any(1)
    place = torch.where(passed.any(1), passed.int().argmax(1), last)
    at = place.unsqueeze(1)
    return place, target - (running.gather(1, at) - weights.gather(1, at)).squeeze(1)
