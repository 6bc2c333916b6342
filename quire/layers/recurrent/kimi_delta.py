"""Kimi Delta Attention (Kimi Linear, 2025): a convolution, the gated delta rule where each column of keys fades at its
own rate, a norm and a gate of sigmoids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.attention.recurrent import StatePart
from quire.distributed.topology import Topology
from quire.kernels.elementwise.gated_norm import gated_norm
from quire.kernels.recurrent.channel_delta import channel_delta
from quire.kernels.recurrent.conv import causal_conv
from quire.layers.cuts import Cut, cut_parameter
from quire.layers.linear import Linear
from quire.layers.norm import Norm, RMSNorm
from quire.layers.recurrent.base import Conv, Recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSizes:
    """head_dim: of queries, keys and values alike, and the rank of what says how fast columns fade and of the gate."""

    hidden: int
    heads: int
    head_dim: int
    taps: int
    eps: float


class KimiDelta(Recurrent):
    """Its state is kept in float32, as transformers computes it; the convolution's in the model's type.

    Ranks share the heads. What the fading and the gate are made of is whole on each, and so is `A_log`, a number a
    head."""

    def __init__(self, index: int, sizes: KimiDeltaSizes) -> None:
        heads, dim = sizes.heads, sizes.head_dim
        width = heads * dim
        conv = Conv(3 * width, sizes.taps, bias=False, parts={f"{part}_conv1d": width for part in "qkv"})
        super().__init__(index, (StatePart((heads, dim, dim)), conv.state()))
        self.sizes, self.conv1d = sizes, conv
        parts = {"q_proj": width, "k_proj": width, "v_proj": width, "f_a_proj": dim, "g_a_proj": dim, "b_proj": heads}
        self.in_proj = Linear(
            sizes.hidden, sum(parts.values()), bias=False, parts=parts, role="rows",
            heads=(heads, heads, heads, 1, 1, heads),
        )  # fmt: skip
        self.f_b_proj, self.g_b_proj = (
            Linear(dim, width, bias=False, role="rows", heads=(heads,)) for _ in range(2)
        )  # fmt: skip
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32), requires_grad=False)
        self.A_log = nn.Parameter(torch.empty(1, 1, heads, 1, dtype=torch.float32), requires_grad=False)
        self.o_norm = RMSNorm(dim, sizes.eps)
        self.o_proj = Linear(width, sizes.hidden, bias=False, role="columns")
        self._own = slice(0, heads)

    def share_with(self, topology: Topology) -> None:
        heads, dim = self.sizes.heads, self.sizes.head_dim
        by_head, share = (heads * dim, heads), topology.lines(heads, heads, "linear_num_heads")
        self.conv1d.cut(Cut.of([by_head] * 3, topology))
        cut_parameter(self, "dt_bias", Cut.of([by_head], topology))
        self._own = slice(share.begin, share.end)
        self.sizes = replace(self.sizes, heads=share.room)
        self.states = (StatePart((self.sizes.heads, dim, dim)), self.conv1d.state())

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        cache, rows = self._place(ctx)
        heads, dim = self.sizes.heads, self.sizes.head_dim
        width = heads * dim
        memory, conv = cache.parts
        inner, fading, gate, b = self.in_proj(x, norm).split([3 * width, dim, dim, heads], dim=1)
        inner = causal_conv(inner, self.conv1d.weight[:, 0], None, conv, rows, cache.entry)
        q, k, v = (part.unflatten(1, (heads, dim)) for part in inner.chunk(3, dim=1))
        fading = self.f_b_proj(fading.contiguous()).float() + self.dt_bias
        decay = -torch.exp(self.A_log[0, :, self._own]) * nn.functional.softplus(fading).unflatten(1, (heads, dim))
        y = channel_delta(q, k, v, decay, torch.sigmoid(b.float()), memory, rows, cache.entry)
        opened, head_norm = self.g_b_proj(gate.contiguous()), self.o_norm
        y = gated_norm(y.flatten(1), opened, head_norm.weight, head_norm.eps, width=dim, gate_first=False, sigmoid=True)
        out: torch.Tensor = self.o_proj(y, residual=residual)
        return out
