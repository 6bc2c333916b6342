"""Triton twin of `kernels.sampling.bitmask`: a program for a stretch of one row, which reads nothing of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import cdiv

_WORDS = 128  # of a row's mask, that a program looks at together


@triton.jit(do_not_specialize_on_alignment=["rows", "bits"])
def _bitmask_kernel(logits, rows, bits, stride, vocab, num_words, WORDS: tl.constexpr):
    line = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + line).to(tl.int64)
    token = tl.program_id(0) * WORDS * 32 + tl.arange(0, WORDS * 32)
    inside = token < vocab
    word = tl.load(bits + line * num_words + token // 32, mask=inside, other=0)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits + row * stride + token, float("-inf"), mask=forbidden)


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    lines, num_words = bits.shape
    if lines:
        grid = (cdiv(num_words, _WORDS), lines)
        _bitmask_kernel[grid](
            logits, rows, bits, logits.stride(0), logits.shape[1], num_words, WORDS=_WORDS, num_warps=8
        )
