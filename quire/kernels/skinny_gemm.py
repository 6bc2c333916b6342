"""x @ weight.T for a handful of rows: where the library's kernels leave memory bandwidth unused."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from quire.kernels.dispatch import INTERPRETED

if TYPE_CHECKING:
    from quire.kernels.triton.skinny_gemm_table import Plan

MAX_ROWS = 16

logger = logging.getLogger(__name__)


@cache
def _gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon, which Triton calls experimental, run on `device`."""
    if INTERPRETED or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] < 8:
        return False
    try:
        from quire.kernels.triton import skinny_registers  # noqa: F401
    except (ImportError, AttributeError) as error:
        logger.warning("small batches have more kernels than they need: %s", error)
        return False
    return True


def plan(x: torch.Tensor, weight: torch.Tensor, *, normed: bool, gated: bool) -> Plan | None:
    """How to multiply x [m, k] by weight ([n, k], or [2n, k] if gated), with norm and gate if asked for; None: not
    here."""
    m, k = x.shape
    if not (x.is_cuda and 1 <= m <= MAX_ROWS and k >= 64 and x.dtype in (torch.bfloat16, torch.float16)):
        return None
    from quire.kernels.triton.skinny_gemm_table import Registers
    from quire.kernels.triton.skinny_gemm_table import plan as plan_of

    how = plan_of(m, weight.shape[0] // (2 if gated else 1), k, gated)
    if not isinstance(how, Registers):
        return None if normed or gated else how
    aligned = x.stride(0) % 8 == weight.stride(0) % 8 == 0  # eight elements at once
    return how if aligned and _gluon(x.device) else None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    plan: Plan,
) -> torch.Tensor:
    """See `quire.kernels.linear`. Sums are rounded once, to the result's dtype."""
    from quire.kernels.triton import skinny_gemm

    if residual is not None:
        return skinny_gemm.linear(x, weight, bias, norm, gated, True, residual, plan)
    if out is None:
        n = weight.shape[0] // (2 if gated else 1)
        out = torch.empty((x.shape[0], n), dtype=out_dtype or x.dtype, device=x.device)
    return skinny_gemm.linear(x, weight, bias, norm, gated, False, out, plan)
