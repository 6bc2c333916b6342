"""Linear layers."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels.gemm.linear import linear
from quire.layers.norm import RMSNorm


class Linear(nn.Module):
    """y = x @ weight.T + bias; weight [out, in] as checkpoints have it.

    `parts` names the checkpoint's modules, siblings of this one, whose tensors are stacked to make this one's:
    {"q_proj": rows, …} in the order of the rows. Empty: the checkpoint has a module of this one's own name.
    gated: the rows are [gate | up], and y = silu(x @ gate.T) * (x @ up.T).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        parts: dict[str, int] | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.parts = parts or {}
        self.gated = gated
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @classmethod
    def qkv(cls, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> Linear:
        """Query, key and value projections as one: [q heads | k heads | v heads]."""
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        return cls(hidden, sum(parts.values()), bias=bias, parts=parts)

    @classmethod
    def gate_up(cls, hidden: int, intermediate: int, *, bias: bool) -> Linear:
        """The first half of a gated feed-forward layer: [tokens, hidden] → silu(gate) * up [tokens, intermediate]."""
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        return cls(hidden, 2 * intermediate, bias=bias, parts=parts, gated=True)

    def forward(
        self, x: torch.Tensor, norm: RMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """norm: what x goes through first. residual: the result is added to it in place, and it is returned."""
        pair = None if norm is None else (norm.weight, norm.eps)
        return linear(x, self.weight, self.bias, norm=pair, gated=self.gated, residual=residual)
