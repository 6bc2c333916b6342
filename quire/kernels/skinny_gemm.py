"""x @ weight.T for a handful of rows, with norm, gate and residual sum: where the library's kernels leave memory
bandwidth unused, and where every launch counts."""

from __future__ import annotations

import logging
from functools import cache

import torch

MAX_ROWS = 16

logger = logging.getLogger(__name__)


@cache
def _available(device: torch.device) -> bool:
    """Whether the kernels run on `device`: they are written in Gluon, which Triton calls experimental."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] < 8:
        return False
    try:
        from quire.kernels.triton import skinny_gemm  # noqa: F401
    except (ImportError, AttributeError) as error:
        logger.warning("small batches go through the library's products, which are slower: %s", error)
        return False
    return True


def pays(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> bool:
    """Whether `linear` takes x [m, k] and weight ([n, k], or [2n, k] if gated), and beats the library."""
    m, k = x.shape
    if not (
        1 <= m <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and k % 8 == x.stride(0) % 8 == weight.stride(0) % 8 == 0  # what one load brings
        and _available(x.device)
    ):
        return False
    from quire.kernels.triton.skinny_gemm_table import plan

    return plan(m, weight.shape[0] // (2 if gated else 1), k, gated) is not None


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
    from quire.kernels.triton import skinny_gemm

    if residual is not None:
        return skinny_gemm.linear(x, weight, bias, norm, gated, True, residual)
    if out is None:
        n = weight.shape[0] // (2 if gated else 1)
        out = torch.empty((x.shape[0], n), dtype=out_dtype or x.dtype, device=x.device)
    return skinny_gemm.linear(x, weight, bias, norm, gated, False, out)
