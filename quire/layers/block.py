"""The decoder layer that most families share."""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.layers.attention import Attention
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward, with a residual sum after each half.

    The norms are named here, where checkpoints have them, and computed inside the products that follow them.
    """

    def __init__(self, self_attn: Attention, mlp: GatedMLP, hidden: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = mlp

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [tokens, hidden]: updated in place and returned."""
        residual = self.self_attn(residual, self.input_layernorm, ctx)
        y: torch.Tensor = self.mlp(residual, self.post_attention_layernorm)
        return y
