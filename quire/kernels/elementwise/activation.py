"""Activations of feed-forward layers."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_cpu, on_triton
from quire.kernels.elementwise import cpu as cpu_elementwise


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's middle: gate_up [tokens, 2 * size] (gate first) → silu(gate) * up [tokens, size], float32 inside."""
    if on_triton(gate_up):
        from quire.kernels.elementwise.triton import activation

        return activation.silu_and_mul(gate_up)
    return cpu_elementwise.silu_and_mul(gate_up) if on_cpu(gate_up) else silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The same with GELU (Hendrycks and Gimpel, 2016, by its tanh form) for SiLU."""
    if on_triton(gate_up):
        from quire.kernels.elementwise.triton import activation

        return activation.gelu_tanh_and_mul(gate_up)
    return cpu_elementwise.gelu_tanh_and_mul(gate_up) if on_cpu(gate_up) else gelu_tanh_and_mul_reference(gate_up)


def gelu_tanh_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Squared ReLU (So et al., Primer, 2021) of x [..., size], float32 inside; a contiguous tensor of x's type."""
    if on_triton(x):
        from quire.kernels.elementwise.triton import activation

        return activation.relu2(x)
    return torch.nn.functional.relu(x).square_()


def softcap_(x: torch.Tensor, cap: float, scale: float = 1.0) -> torch.Tensor:
    """x = cap · tanh(scale · x / cap) in place; x float32 [rows, columns], its rows contiguous."""
    if on_triton(x):
        from quire.kernels.elementwise.triton import activation

        return activation.softcap_(x, cap, scale)
    return x.mul_(scale / cap).tanh_().mul_(cap)
