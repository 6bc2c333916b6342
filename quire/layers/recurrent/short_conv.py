"""LFM2's short convolution between two gates: C · conv(B · x), all three of the same product."""

from __future__ import annotations

import torch

from quire.attention.context import StepContext
from quire.distributed.topology import Topology
from quire.kernels.recurrent.conv import causal_conv
from quire.layers.cuts import Cut
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.recurrent.base import Conv, Recurrent


class ShortConv(Recurrent):
    def __init__(self, index: int, hidden: int, taps: int, *, bias: bool) -> None:
        conv = Conv(hidden, taps, bias=bias)
        super().__init__(index, (conv.state(),))
        self.conv = conv
        self.in_proj = Linear(hidden, 3 * hidden, bias=bias, role="rows")
        self.out_proj = Linear(hidden, hidden, bias=bias, role="columns")

    def share_with(self, topology: Topology) -> None:
        hidden = self.out_proj.in_features
        self.in_proj.part_for(topology, dict.fromkeys(("before", "after", "inner"), (hidden, hidden)))
        self.conv.cut(Cut.of([(hidden, hidden)], topology))
        self.states = (self.conv.state(),)

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        cache, rows = self._place(ctx)
        before, after, inner = self.in_proj(x, norm).chunk(3, dim=1)
        y = causal_conv(
            before * inner, self.conv.weight[:, 0], self.conv.bias, cache.parts[0], rows, cache.entry, silu=False
        )
        out: torch.Tensor = self.out_proj(after * y, residual=residual)
        return out
