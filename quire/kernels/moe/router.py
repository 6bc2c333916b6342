"""Logits of experts: a product of few outputs, so that few rows are a matter of latency alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.kernels.gemm import decode_gemm
from quire.kernels.gemm.linear import linear

if TYPE_CHECKING:
    from quire.kernels.gemm.triton.plan import Plan


def router_logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [tokens, hidden], or its RMS norm (weight, eps), @ weight [experts, hidden].T + bias [experts] → float32
    [tokens, experts]."""
    how = _plan(x, weight)
    if how is None:
        return linear(x, weight, bias, norm=norm, out_dtype=torch.float32)
    return decode_gemm.linear(x, weight, bias, norm, False, None, torch.float32, None, how)


def _plan(x: torch.Tensor, weight: torch.Tensor) -> Plan | None:
    """Cut up finer than products of many outputs; None: as any product."""
    usual = decode_gemm.plan(x, weight, gated=False, residual=False) if x.dtype == torch.bfloat16 else None
    if usual is None:
        return None
    from quire.kernels.gemm.triton.plan import Registers, Tiles, Vector

    rows, k = x.shape
    if rows == 1:
        return Vector(2, 2048, 4) if isinstance(usual, Vector | Registers) else usual
    if rows <= 16:
        return Registers(16, 128, 2, 8) if isinstance(usual, Registers) and k <= 4096 else usual
    if not isinstance(usual, Tiles):
        return usual
    return Tiles(16, 16, 128, min(max(k // 512, 1), 8), 1, 4, prefetch=256)
