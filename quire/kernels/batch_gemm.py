"""x @ weight.T for the rows of a decode batch, with norm, gate and residual sum: where the weight's bytes still count
more than the arithmetic, and launches as well."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import INTERPRETED


def pays(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> bool:
    """Whether `linear` takes x [m, k] and weight ([n, k], or [2n, k] if gated), and beats the library."""
    m, k = x.shape
    if not (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and k % 8 == x.stride(0) % 8 == weight.stride(0) % 8 == 0  # what the bulk copy engine needs
        and not INTERPRETED
    ):
        return False
    from quire.kernels.triton import batch_gemm

    return batch_gemm.pays(m, weight.shape[0] // (2 if gated else 1), k, gated, x.device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See `quire.kernels.linear`, for x and weight that it `pays` for. Sums are rounded once, to the result's dtype."""
    from quire.kernels.triton import batch_gemm

    if out is None and out_dtype is not None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    norm_weight, eps = norm or (None, 0.0)
    return batch_gemm.linear(x, weight, bias, norm_weight, eps, gated, residual, out)
