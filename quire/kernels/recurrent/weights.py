"""What scans have of a layer's own, as checkpoints have it: float32. a_log: the logarithm of -a; a is what a step in
time is multiplied by, the logarithm of what a state keeps."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SSDWeights(NamedTuple):
    """[heads] each. limit: that dt is clamped to."""

    a_log: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    limit: tuple[float, float]


class SelectiveWeights(NamedTuple):
    """a_log [channels, state]. d [channels]."""

    a_log: torch.Tensor
    d: torch.Tensor


class DeltaWeights(NamedTuple):
    """[heads] each. most: that a correction is multiplied by at most."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor
    most: float = 1.0
