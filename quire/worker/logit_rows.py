"""Where logits lie."""

from __future__ import annotations

import torch

LINE = 32  # numbers that a row begins on a multiple of


def logit_rows(rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """float32 [rows, vocab], whose rows begin where products with any vocabulary have fast kernels for."""
    whole = torch.empty(rows, -(-vocab // LINE) * LINE, dtype=torch.float32, device=device)
    return whole[:, :vocab]
