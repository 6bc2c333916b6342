"""Self-attention over the paged cache: projections here, the attending in a backend."""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.kernels.attention.qkv import qkv_rope_write
from quire.kernels.attention.rope import QkvTarget
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    index: which of the model's caches is this layer's. cos_sin: the model's rotary table. qk_norm_eps: turns on an
    RMS norm of every query and key head.
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
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.index = index
        self.heads = (num_heads, num_kv_heads, head_dim)
        self.scale = head_dim**-0.5
        self.cos_sin = cos_sin
        self.qkv_proj = Linear.qkv(hidden, num_heads, num_kv_heads, head_dim, bias=qkv_bias)
        self.o_proj = Linear(num_heads * head_dim, hidden, bias=out_bias)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = RMSNorm(head_dim, qk_norm_eps), RMSNorm(head_dim, qk_norm_eps)

    def forward(self, residual: torch.Tensor, norm: RMSNorm, ctx: StepContext) -> torch.Tensor:
        """`residual += attention(norm(residual))` in place, [tokens, hidden]; returns it.

        Writes the tokens' keys and values to the cache.
        """
        cache, proj = ctx.caches[self.index], self.qkv_proj
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if self.q_norm and self.k_norm else ()
        place = QkvTarget(self.cos_sin, ctx.positions, ctx.slots, cache.k, cache.v, *self.heads, *norms)
        q = qkv_rope_write(residual, proj.weight, proj.bias, (norm.weight, norm.eps), place)
        y: torch.Tensor = self.o_proj(ctx.backend.run(q, cache, ctx.plan, self.scale), residual=residual)
        return y
