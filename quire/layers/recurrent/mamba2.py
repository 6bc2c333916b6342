"""Mamba-2 (Dao and Gu, 2024): a convolution, a scan over states of heads, a gate and a norm."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.attention.recurrent import StatePart
from quire.distributed.group import Group
from quire.distributed.topology import Topology
from quire.kernels.elementwise.gated_norm import gate_only, gated_norm
from quire.kernels.recurrent.conv import causal_conv
from quire.kernels.recurrent.ssd import SSDWeights, ssd
from quire.layers.cuts import Cut, cut_parameter, square_sums
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.recurrent.base import Conv, Recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes:
    """groups: of heads that share B and C. state: numbers of a head's column. limit: of the steps in time."""

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    eps: float
    limit: tuple[float, float] = (0.0, float("inf"))
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Numbers of all groups' B, or C."""
        return self.groups * self.state


class GatedNorm(nn.Module):
    """RMS norm of each of `groups` parts, of x · silu(gate), or of x and then the gate (`gate_first` False). Of longer
    lines than it has weights each run of as many."""

    def __init__(self, size: int, eps: float, *, groups: int = 1, gate_first: bool = True) -> None:
        super().__init__()
        self.eps, self.groups, self.gate_first = eps, groups, gate_first
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def divide(self, topology: Topology, heads: int) -> None:
        """Keep the weights of this rank's heads. Parts that several ranks share are normed together."""
        size = len(self.weight)
        cut_parameter(self, "weight", Cut.of([(size, heads)], topology))
        self._part, self._columns, self._every = topology.rank * self.groups // topology.size, size, self.groups
        self._spans = topology.size > self.groups
        self.groups = topology.heads(self.groups, "groups of heads")

    def across(self, x: torch.Tensor, gate: torch.Tensor, group: Group) -> torch.Tensor:
        """The same of this rank's columns."""
        if not self._spans:
            return self.forward(x, gate)
        wide, factor = x.float(), nn.functional.silu(gate.float())
        if self.gate_first:
            wide = wide * factor
        squares = wide.new_zeros(len(wide), self._every)
        squares[:, self._part] = wide.square().sum(1)
        mean = square_sums(squares, group)[:, self._part, None] / (self._columns // self._every)
        normed = wide * torch.rsqrt(mean + self.eps) * self.weight.float()
        y: torch.Tensor = normed if self.gate_first else normed * factor
        return y.to(x.dtype)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        width = len(self.weight) // self.groups
        return gated_norm(x, gate, self.weight, self.eps, width=width, gate_first=self.gate_first)


class Mamba2(Recurrent):
    """norm: what stands between the scan and the projection back; None: the gate alone. scales: float32 [rows of
    in_proj], that what it makes is multiplied by.

    Its state is kept in float32, as transformers computes it; the convolution's in the model's type.
    """

    def __init__(
        self, index: int, sizes: Mamba2Sizes, norm: GatedNorm | None, *, scales: torch.Tensor | None = None
    ) -> None:
        channels = sizes.inner + 2 * sizes.shared
        conv = Conv(channels, sizes.taps, bias=sizes.conv_bias)
        scan = StatePart((sizes.heads, sizes.head_dim, sizes.state))
        super().__init__(index, (scan, conv.state()))
        self.sizes, self._scales = sizes, scales
        self.in_proj = Linear(sizes.hidden, sizes.inner + channels + sizes.heads, bias=sizes.bias, role="rows")
        self.conv1d = conv
        self.dt_bias, self.A_log, self.D = (
            nn.Parameter(torch.empty(sizes.heads, dtype=torch.float32), requires_grad=False) for _ in range(3)
        )
        self.norm = norm
        self.out_proj = Linear(sizes.inner, sizes.hidden, bias=sizes.out_bias, role="columns")

    def share_with(self, topology: Topology) -> None:
        sizes = self.sizes
        heads, by_head = (sizes.heads, sizes.heads), (sizes.inner, sizes.heads)
        by_group = (sizes.shared, sizes.groups)
        parts = {"gate": by_head, "inner": by_head, "b": by_group, "c": by_group, "dt": heads}
        self.in_proj.part_for(topology, parts)
        self.conv1d.cut(Cut.of([by_head, by_group, by_group], topology))
        for name in ("dt_bias", "A_log", "D"):
            cut_parameter(self, name, Cut.of([heads], topology))
        if self._scales is not None:
            self._scales = Cut.of(list(parts.values()), topology).part(self._scales)
        if self.norm is not None:
            self.norm.divide(topology, sizes.heads)
        self.sizes = sizes = replace(
            sizes, heads=topology.share(sizes.heads, "heads"), groups=topology.heads(sizes.groups, "groups of heads")
        )
        scan = StatePart((sizes.heads, sizes.head_dim, sizes.state))
        self.states = (scan, self.conv1d.state())

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        sizes, (cache, rows) = self.sizes, self._place(ctx)
        scan, conv = cache.parts
        projected = self.in_proj(x, norm)
        if self._scales is not None:
            projected = projected * self._scales.to(projected.dtype)
        gate, inner, dt = projected.split([sizes.inner, sizes.inner + 2 * sizes.shared, sizes.heads], dim=1)
        inner = causal_conv(inner, self.conv1d.weight[:, 0], self.conv1d.bias, conv, rows, cache.entry)
        u, b, c = inner.split([sizes.inner, sizes.shared, sizes.shared], dim=1)
        weights = SSDWeights(self.A_log, self.D, self.dt_bias, sizes.limit)
        y = ssd(
            u.unflatten(1, (sizes.heads, sizes.head_dim)),
            b.unflatten(1, (sizes.groups, sizes.state)),
            c.unflatten(1, (sizes.groups, sizes.state)),
            dt,
            weights,
            scan,
            rows,
            cache.entry,
        ).flatten(1)
        if self.norm is None:
            y = gate_only(y, gate)
        else:
            y = self.norm(y, gate) if self.ranks is None else self.norm.across(y, gate, self.ranks)
        out: torch.Tensor = self.out_proj(y, residual=residual)
        return out
