"""A gate of one number a token."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton


def sigmoid_gate(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y [tokens, n] *= sigmoid(x [tokens, hidden] · weight [1, hidden]) in place, float32 inside; returns y."""
    if on_triton(x):
        from quire.kernels.moe.triton import gate

        return gate.sigmoid_gate(y, x, weight)
    return y.mul_(torch.sigmoid(x.float() @ weight[0].float())[:, None])
