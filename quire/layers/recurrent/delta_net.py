"""Gated DeltaNet (Yang et al., 2024), as Qwen3-Next has it: a convolution, the gated delta rule, a norm and a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.attention.recurrent import StatePart
from quire.distributed.topology import Topology
from quire.kernels.recurrent.conv import causal_conv
from quire.kernels.recurrent.delta import DeltaWeights, gated_delta
from quire.layers.cuts import Cut, cut_parameter
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.recurrent.base import Conv, Recurrent
from quire.layers.recurrent.mamba2 import GatedNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """key_heads: each for as many value heads; dims: of a head. conv_parts: see `Conv`. most: that a correction is
    multiplied by at most, behind its sigmoid."""

    hidden: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    conv_parts: Mapping[str, int] | None = None
    most: float = 1.0

    @property
    def parts(self) -> dict[str, int]:
        """Of a projection: queries, keys, values, the gate, and what says how much is corrected and kept."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        return {"q": keys, "k": keys, "v": values, "z": values, "b": self.heads, "a": self.heads}

    @property
    def heads_of_parts(self) -> tuple[int, ...]:
        return self.key_heads, self.key_heads, self.heads, self.heads, self.heads, self.heads


class GatedDeltaNet(Recurrent):
    """projection: of all `DeltaSizes.parts`, in their order. Its state is kept in float32, as transformers computes it;
    the convolution's in the model's type."""

    def __init__(self, index: int, sizes: DeltaSizes, projection: Linear) -> None:
        parts = sizes.parts
        conv = Conv(parts["q"] + parts["k"] + parts["v"], sizes.taps, bias=False, parts=sizes.conv_parts)
        super().__init__(index, (StatePart((sizes.heads, sizes.key_dim, sizes.value_dim)), conv.state()))
        self.sizes, self.in_proj, self.conv1d = sizes, projection, conv
        self.dt_bias, self.A_log = (
            nn.Parameter(torch.empty(sizes.heads, dtype=torch.float32), requires_grad=False) for _ in range(2)
        )
        self.norm = GatedNorm(sizes.value_dim, sizes.eps, gate_first=False)
        self.out_proj = Linear(parts["v"], sizes.hidden, bias=False, role="columns")

    def share_with(self, topology: Topology) -> None:
        sizes = self.sizes
        q, k, v, *_ = zip(sizes.parts.values(), sizes.heads_of_parts, strict=True)
        self.conv1d.cut(Cut.of([q, k, v], topology))
        for name in ("dt_bias", "A_log"):
            cut_parameter(self, name, Cut.of([(sizes.heads, sizes.heads)], topology))
        self.sizes = sizes = replace(
            sizes,
            key_heads=topology.heads(sizes.key_heads, "linear_num_key_heads"),
            heads=topology.share(sizes.heads, "linear_num_value_heads"),
        )
        memory = StatePart((sizes.heads, sizes.key_dim, sizes.value_dim))
        self.states = (memory, self.conv1d.state())

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        sizes, (cache, rows) = self.sizes, self._place(ctx)
        parts, (memory, conv) = sizes.parts, cache.parts
        keys, values = parts["q"], parts["v"]
        inner, z, b, a = self.in_proj(x, norm).split([2 * keys + values, values, sizes.heads, sizes.heads], dim=1)
        inner = causal_conv(inner, self.conv1d.weight[:, 0], None, conv, rows, cache.entry)
        q, k, v = inner.split([keys, keys, values], dim=1)
        y = gated_delta(
            q.unflatten(1, (sizes.key_heads, sizes.key_dim)),
            k.unflatten(1, (sizes.key_heads, sizes.key_dim)),
            v.unflatten(1, (sizes.heads, sizes.value_dim)),
            a,
            b,
            DeltaWeights(self.A_log, self.dt_bias, sizes.most),
            memory,
            rows,
            cache.entry,
        )
        out: torch.Tensor = self.out_proj(self.norm(y.flatten(1), z), residual=residual)
        return out
