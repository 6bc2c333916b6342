"""Llama's layers with a feed-forward that has no gate: down(relu(up(x))²), as Arcee's models have it (So et al., 2021).

What the worker imports for models whose config.json says `SquaredReluForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quire.config.reading import read
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Sizes

defaults = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # of keys that config.json may lack


class SquaredReluMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.up_proj = Linear(hidden, intermediate, bias=False, role="rows")
        self.down_proj = Linear(intermediate, hidden, bias=False, role="columns")

    def forward(self, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """`residual += mlp(norm(residual))` in place, [tokens, hidden]; returns it."""
        inner = self.up_proj(residual, norm).relu_().square_()
        return self.down_proj(inner, residual=residual)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, cos_sin)
        return DecoderLayer(attention, SquaredReluMLP(sizes.hidden, sizes.intermediate), sizes.hidden, sizes.eps)

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"))
