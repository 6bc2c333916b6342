"""x @ weight.T for a weight in codes (`codes.Codes`), with what stands around it in a layer."""

from __future__ import annotations

import torch

from quire.kernels.gemm.codes import Codes, widened
from quire.kernels.gemm.linear import linear as plain_linear


def linear(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `quire.kernels.gemm.linear`."""
    return plain_linear(
        x, widened(weight, x.dtype), bias,
        norm=norm, gated=gated, residual=residual, out_dtype=out_dtype, out=out,
    )  # fmt: skip
