"""Integers of few bits out of words of 32."""

from __future__ import annotations

import torch

WORD = 32


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., w] → uint8 [..., w * 32 / bits]: one stream of bits, the lowest first."""
    shifts = torch.arange(0, WORD, bits if WORD % bits == 0 else 1, device=words.device, dtype=torch.int32)
    most = (1 << bits) - 1 if WORD % bits == 0 else 1
    stream: torch.Tensor = ((words[..., None] >> shifts) & most).to(torch.uint8).flatten(-2)
    if WORD % bits == 0:
        return stream
    places = torch.arange(bits, device=words.device, dtype=torch.uint8)
    return (stream.view(*stream.shape[:-1], -1, bits) << places).sum(-1, dtype=torch.uint8)
