"""Token ids to vectors."""

from __future__ import annotations

import torch
from torch import nn


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids int32 [tokens] → [tokens, hidden]."""
        return nn.functional.embedding(input_ids, self.weight)
