"""The layer of BERT and its kin: attention both ways, a plain feed-forward, and a norm behind each sum."""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.context import EncoderContext
from quire.kernels.gemm.linear import linear
from quire.layers.activation import activation
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm


class EncoderLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, intermediate: int, eps: float, act: str) -> None:
        super().__init__()
        self.scale = (hidden // heads) ** -0.5
        self.act = activation(act)
        parts = dict.fromkeys(("query", "key", "value"), hidden)
        self.qkv = Linear(hidden, 3 * hidden, bias=True, parts=parts, role="rows")
        self.attention_out = Linear(hidden, hidden, bias=True, role="columns")
        self.attention_norm = LayerNorm(hidden, eps)
        self.up = Linear(hidden, intermediate, bias=True, role="rows")
        self.down = Linear(intermediate, hidden, bias=True, role="columns")
        self.norm = LayerNorm(hidden, eps)

    def forward(self, x: torch.Tensor, ctx: EncoderContext) -> torch.Tensor:
        """x [tokens, hidden] is overwritten."""
        y = ctx.backend.run(self.qkv(x), ctx.plan, self.scale)
        x = self.attention_norm(self.attention_out(y, residual=x))
        return self.norm(self.down(self.act(self.up(x)), residual=x))  # type: ignore[no-any-return]


class Dense(nn.Module):
    """A layer of a head: few rows, in float32. source: what checkpoints call it."""

    def __init__(self, source: str, in_features: int, out_features: int, *, bias: bool, act: str = "identity") -> None:
        super().__init__()
        self.source = source
        self.act = activation(act.lower())
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=torch.float32), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(linear(x.float(), self.weight, self.bias))
