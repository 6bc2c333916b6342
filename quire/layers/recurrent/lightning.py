"""Lightning attention (Qin et al., 2024), as MiniMax has it: attention without a softmax, to tokens that fade by a
fixed rate a head; the sum over all of them is a state."""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.attention.recurrent import StatePart
from quire.distributed.topology import Topology
from quire.kernels.elementwise.gated_norm import gate_only
from quire.kernels.recurrent.ssd import SSDWeights, ssd
from quire.layers.cuts import Cut, cut_parameter
from quire.layers.linear import Linear, Stored
from quire.layers.norm import Norm, RMSNorm, norm_across
from quire.layers.recurrent.base import Recurrent

_NORM_EPS = 1e-6


class LightningAttention(Recurrent):
    """depth: this layer's place, 0 … 1: the deeper, the slower tokens fade. Checkpoints have queries, keys and values
    of each head one behind the other.

    It is Mamba-2's scan with steps of 1: S = exp(-rate) S + v kᵀ; y = S q. The state is kept in float32.
    """

    def __init__(self, index: int, hidden: int, heads: int, head_dim: int, depth: float) -> None:
        super().__init__(index, (StatePart((heads, head_dim, head_dim)),))
        self.heads, self.head_dim, width = heads, head_dim, heads * head_dim
        stored = {}
        for place, part in enumerate("qkv"):
            firsts = range(place * head_dim, 3 * width, 3 * head_dim)
            stored[part] = Stored("qkv_proj", 3 * width, tuple((first, first + head_dim) for first in firsts))
        parts = {"q": width, "k": width, "v": width, "output_gate": width}
        self.qkv_gate = Linear(
            hidden, 4 * width, bias=False, parts=parts, role="rows", heads=(heads,) * 4, stored=stored
        )
        self.norm = RMSNorm(width, _NORM_EPS)
        self.out_proj = Linear(width, hidden, bias=False, role="columns")
        self._rates = 2.0 ** (-8 / heads * torch.arange(1, heads + 1, dtype=torch.float32)) * (1 - depth + 1e-5)
        self._set_weights()

    def _set_weights(self) -> None:
        nothing = torch.zeros_like(self._rates)
        self._weights = SSDWeights(self._rates.log(), nothing, nothing, (1.0, 1.0))
        self._steps = torch.zeros(1, self.heads)  # what it is does not matter: the limits say 1

    def share_with(self, topology: Topology) -> None:
        heads, head_dim = self.heads, self.head_dim
        cut_parameter(self.norm, "weight", Cut.of([(heads * head_dim, heads)], topology))
        self._rates = Cut.of([(heads, heads)], topology).part(self._rates)
        self.heads = topology.share(heads, "num_attention_heads")
        self._set_weights()
        self.states = (StatePart((self.heads, head_dim, head_dim)),)

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        cache, rows = self._place(ctx)
        width = self.heads * self.head_dim
        inner, gate = self.qkv_gate(x, norm).split([3 * width, width], dim=1)
        q, k, v = (part.unflatten(1, (self.heads, self.head_dim)) for part in nn.functional.silu(inner).chunk(3, dim=1))
        steps = self._steps.expand(len(x), self.heads)
        y = ssd(v, k, q, steps, self._weights, cache.parts[0], rows, cache.entry).flatten(1)
        if self.ranks is None:
            y = self.norm(y)
        else:
            (y,) = norm_across([self.norm], [y], [1], self.ranks.topology, self.ranks)
        out: torch.Tensor = self.out_proj(gate_only(y, gate, sigmoid=True), residual=residual)
        return out
