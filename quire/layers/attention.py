"""Self-attention over the paged cache: projections here, the attending in a backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.distributed.topology import Topology
from quire.kernels.attention.rope import QkvTarget
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm


class Keeps(NamedTuple):
    """What a layer keeps of every token, and for how long. Layers that keep the same are one group."""

    kind: str  # see KVGroupSpec
    num_kv_heads: int
    head_dim: int
    window: int  # tokens that a query sees, its own included; 0: all


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    index: which of the model's caches is this layer's. cos_sin: the model's rotary table. window: tokens that a query
    sees, its own included; None: all. qk_norm_eps: turns on an RMS norm of every query and key head. The model sets
    `group`, the number of the layer's group, once it knows all of its layers.
    """

    def __init__(
        self,
        index: int,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos_sin: torch.Tensor,
        *,
        window: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.index, self.group = index, 0
        self.keeps = Keeps("window" if window else "full", num_kv_heads, head_dim, window or 0)
        self.heads = (num_heads, num_kv_heads, head_dim)
        self.scale = head_dim**-0.5
        self.cos_sin = cos_sin
        self.qkv_proj = Linear.qkv(hidden, num_heads, num_kv_heads, head_dim, bias=qkv_bias)
        self.o_proj = Linear(num_heads * head_dim, hidden, bias=out_bias, role="columns")
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = RMSNorm(head_dim, qk_norm_eps), RMSNorm(head_dim, qk_norm_eps)

    def share_with(self, topology: Topology) -> None:
        """Attend to this rank's share of the heads alone."""
        heads, kv_heads, head_dim = self.heads
        self.heads = (
            topology.share(heads, "num_attention_heads"), topology.heads(kv_heads, "num_key_value_heads"), head_dim
        )  # fmt: skip

    def forward(self, residual: torch.Tensor, norm: RMSNorm, ctx: StepContext) -> torch.Tensor:
        """`residual += attention(norm(residual))` in place, [tokens, hidden]; returns it.

        Writes the tokens' keys and values to the cache.
        """
        cache, group = ctx.caches[self.index], ctx.groups[self.group]
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if self.q_norm and self.k_norm else ()
        place = QkvTarget(self.cos_sin, ctx.positions, group.slots, cache.k, cache.v, *self.heads, *norms)
        q = self.qkv_proj.qkv_rope_write(residual, norm, place)
        y: torch.Tensor = self.o_proj(group.backend.run(q, cache, group.plan, self.scale), residual=residual)
        return y
