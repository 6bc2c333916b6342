"""What scans have of a layer's own."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SSDWeights(NamedTuple):
    """float32 [heads] each. a: negative, what dt is multiplied by. limit: that dt is clamped to."""

    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    limit: tuple[float, float]


class SelectiveWeights(NamedTuple):
    """float32. a [channels, state]: negative, what dt is multiplied by. d [channels]."""

    a: torch.Tensor
    d: torch.Tensor
