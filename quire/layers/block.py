"""The decoder layer that most families share."""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.layers.norm import RMSNorm


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward, with a residual sum after each half.

    The sums are fused with the norms that follow them, so this layer's last sum belongs to the next layer's norm:
    it takes its input normed already, and returns what is still to be added to the residual.
    """

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, hidden: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x: the normed residual; both [tokens, hidden]. `residual` is updated in place."""
        x = self.self_attn(x, ctx)
        y: torch.Tensor = self.mlp(self.post_attention_layernorm.add(x, residual))
        return y
