"""Mamba (Gu and Dao, 2023): a convolution, a selective scan over states of channels, and a gate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.attention.recurrent import StatePart
from quire.distributed.topology import Topology
from quire.kernels.elementwise.gated_norm import gate_only
from quire.kernels.recurrent.conv import causal_conv
from quire.kernels.recurrent.selective import SelectiveWeights, selective_scan
from quire.layers.cuts import Cut, cut_parameter
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.recurrent.base import Conv, Recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """inner: channels. state: numbers of each. rank: of what the steps in time are made of."""

    hidden: int
    inner: int
    state: int
    rank: int
    taps: int
    bias: bool
    conv_bias: bool


class Mamba(Recurrent):
    """norms: what steps, B and C go through, by their names in checkpoints; none if there are none.

    Its state is kept in float32, as transformers computes it; the convolution's in the model's type.
    """

    def __init__(self, index: int, sizes: MambaSizes, norms: tuple[tuple[str, nn.Module], ...] = ()) -> None:
        conv = Conv(sizes.inner, sizes.taps, bias=sizes.conv_bias)
        super().__init__(index, (StatePart((sizes.inner, sizes.state)), conv.state()))
        self.sizes, self.conv1d = sizes, conv
        self.in_proj = Linear(sizes.hidden, 2 * sizes.inner, bias=sizes.bias, role="rows")
        self.x_proj = Linear(sizes.inner, sizes.rank + 2 * sizes.state, bias=False, role="columns")
        self.dt_proj = Linear(sizes.rank, sizes.inner, bias=True, role="rows")
        self.A_log = nn.Parameter(torch.empty(sizes.inner, sizes.state, dtype=torch.float32), requires_grad=False)
        self.D = nn.Parameter(torch.empty(sizes.inner, dtype=torch.float32), requires_grad=False)
        self.out_proj = Linear(sizes.inner, sizes.hidden, bias=sizes.bias, role="columns")
        for name, module in norms:
            self.add_module(name, module)
        self._norms = [module for _, module in norms]

    def share_with(self, topology: Topology) -> None:
        inner = self.sizes.inner
        cut = Cut.of([(inner, inner)], topology)
        self.in_proj.part_for(topology, {"inner": (inner, inner), "gate": (inner, inner)})
        self.conv1d.cut(cut)
        for name in ("A_log", "D"):
            cut_parameter(self, name, cut)
        self.sizes = replace(self.sizes, inner=len(cut))
        self.states = (StatePart((len(cut), self.sizes.state)), self.conv1d.state())

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        sizes, (cache, rows) = self.sizes, self._place(ctx)
        scan, conv = cache.parts
        inner, gate = self.in_proj(x, norm).chunk(2, dim=1)
        inner = causal_conv(inner, self.conv1d.weight[:, 0], self.conv1d.bias, conv, rows, cache.entry)
        parts = self.x_proj(inner).split([sizes.rank, sizes.state, sizes.state], dim=1)
        if self._norms:
            parts = tuple(module(part) for module, part in zip(self._norms, parts, strict=True))
        steps, b, c = parts
        weights = SelectiveWeights(self.A_log, self.D)
        y = selective_scan(inner, self.dt_proj(steps.contiguous()), b, c, weights, scan, rows, cache.entry)
        out: torch.Tensor = self.out_proj(gate_only(y, gate), residual=residual)
        return out


class PlainNorm(nn.Module):
    """An RMS norm without weights (FalconMamba)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
