"""How far two ways to compute the same are apart."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Distance(NamedTuple):
    """Of two tensors, in root mean squares of the second: of their differences the root mean square, and the largest
    beyond two steps of rounding, by which single large numbers may differ."""

    mean: float
    largest: float


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> Distance:
    """Both of one shape. Infinite where one of them is not finite."""
    x, y = ours.float(), theirs.float()
    scale = y.square().mean().sqrt() + 1e-6
    apart = (x - y).abs()
    beyond = (apart - 2 * torch.finfo(ours.dtype).eps * y.abs()).max() / scale
    found = Distance(float(apart.square().mean().sqrt() / scale), max(0.0, float(beyond)))
    return found if apart.isfinite().all() else Distance(float("inf"), float("inf"))
