"""Attention to the keys and values that an earlier layer keeps (Gemma 3n): a layer with queries of its own alone."""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.context import LayerCache, StepContext
from quire.kernels.attention.rope import rotate
from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.norm import Norm, RMSNorm


class BorrowedAttention(nn.Module):
    """lender: the layer that keeps them, which has run before in every step, and whose heads ranks share alike."""

    def __init__(self, lender: Attention, hidden: int, cos_sin: torch.Tensor, eps: float, *, bias: bool) -> None:
        super().__init__()
        self._lender = (lender,)  # in a tuple, so that it is no submodule
        heads, _, head_dim = lender.heads
        self.cos_sin = cos_sin
        self.q_proj = Linear(hidden, heads * head_dim, bias=bias, role="rows", heads=(heads,))
        self.o_proj = Linear(heads * head_dim, hidden, bias=bias, role="columns")
        self.q_norm = RMSNorm(head_dim, eps)

    def attend(self, x: torch.Tensor, norm: Norm | None, ctx: StepContext) -> torch.Tensor:
        """attention(norm(x)), [tokens, hidden]."""
        lender = self._lender[0]
        cache, group = ctx.caches[lender.index], ctx.groups[lender.group]
        assert isinstance(cache, LayerCache)
        q = self.q_norm(self.q_proj(x, norm).view(len(x), lender.heads[0], lender.heads[2]))
        q = rotate(q, self.cos_sin, ctx.positions, interleaved=False)
        y: torch.Tensor = self.o_proj(group.backend.run(q, cache, group.plan, lender.scale))
        return y
