"""Gated activations of feed-forward layers."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.elementwise import cpu as cpu_elementwise


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's middle: gate_up [tokens, 2 * size] (gate first) → silu(gate) * up [tokens, size], float32 inside."""
    if on_triton(gate_up):
        from quire.kernels.elementwise.triton import activation

        return activation.silu_and_mul(gate_up)
    return cpu_elementwise.silu_and_mul(gate_up)
