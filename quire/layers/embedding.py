"""Token ids to vectors."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels.gemm.linear import linear
from quire.layers.norm import RMSNorm
from quire.quantization.base import ALL_ROWS, Role


class Embedding(nn.Module):
    """Plain in every model. Ranks share it by rows of the vocabulary."""

    role: Role = "vocabulary"

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids int32 [tokens] → [tokens, hidden]."""
        return nn.functional.embedding(input_ids, self.weight)

    def wide(self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of a model that ties its head to its embeddings: norm(x [m, hidden]) @ weight.T in float32."""
        return linear(x, self.weight, norm=(norm.weight, norm.eps), out_dtype=torch.float32, out=out)

    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return self.weight[rows].to(dtype)
