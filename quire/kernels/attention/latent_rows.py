"""What a cache for latent attention holds of a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LatentRows:
    """[latent | rotary key], [rank + rope] numbers of `dtype`, `block_size` tokens a block."""

    rank: int
    rope: int
    block_size: int
    dtype: torch.dtype
