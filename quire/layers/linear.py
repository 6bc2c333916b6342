"""Linear layers, and which kernel multiplies on which device."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels import cpu_linear, skinny_gemm


class Linear(nn.Module):
    """y = x @ weight.T + bias; weight [out, in] as checkpoints have it.

    `parts` names the checkpoint's modules, siblings of this one, whose tensors are stacked to make this one's:
    {"q_proj": rows, …} in the order of the rows. Empty: the checkpoint has a module of this one's own name.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, parts: dict[str, int] | None = None) -> None:
        super().__init__()
        self.parts = parts or {}
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @classmethod
    def qkv(cls, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> Linear:
        """Query, key and value projections as one: [q heads | k heads | v heads]."""
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        return cls(hidden, sum(parts.values()), bias=bias, parts=parts)

    @classmethod
    def gate_up(cls, hidden: int, intermediate: int, *, bias: bool) -> Linear:
        """Both inputs of a gated feed-forward layer as one: [gate | up]."""
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        return cls(hidden, 2 * intermediate, bias=bias, parts=parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T + bias [n] → [m, n], contiguous, in x's dtype."""
    if not x.is_cuda:
        return cpu_linear.linear(x, weight, bias)
    if skinny_gemm.pays(x.shape[0], *weight.shape):
        return skinny_gemm.linear(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def float_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `linear` without bias, but float32 [m, n], into `out` if given: logits keep what the sum has gained."""
    if not x.is_cuda:
        y = cpu_linear.linear(x, weight)
        return y.float() if out is None else out.copy_(y)
    if skinny_gemm.pays(x.shape[0], *weight.shape):
        return skinny_gemm.linear(x, weight, out_dtype=torch.float32, out=out)
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    if x.dtype == torch.float32:
        return torch.mm(x, weight.t(), out=out)
    return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
