"""What a grammar forbids: logits become -inf where the row's bit is 0."""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.kernels.dispatch import on_cpu, on_triton
from quire.kernels.sampling import plain


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """In place, of some rows; the others are left alone.

    logits: float32 [any, vocab], rows contiguous; rows: int32 [n], distinct; bits: int32 [n, ceil(vocab / 32)], token
    t is allowed if bit t % 32 of word t // 32 is set.
    """
    if on_triton(logits):
        from quire.kernels.sampling.triton import bitmask

        bitmask.apply_bitmask(logits, rows, bits)
        return
    if not on_cpu(logits):
        plain.apply_bitmask(logits, rows, bits)
        return
    vocab = logits.shape[1]
    for row, words in zip(rows.tolist(), bits.numpy().view(np.uint8), strict=True):
        forbidden = np.unpackbits(~words, count=vocab, bitorder="little")
        logits[row].masked_fill_(torch.from_numpy(forbidden).view(torch.bool), -math.inf)
