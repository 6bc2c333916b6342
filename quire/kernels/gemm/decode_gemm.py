"""x @ weight.T for the rows of a decode batch, with norm, gate and residual sum: where the library's kernels leave
memory bandwidth unused, and launches count."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from quire.kernels.dispatch import INTERPRETED, on_cuda

if TYPE_CHECKING:
    from quire.kernels.gemm.triton.plan import Plan

logger = logging.getLogger(__name__)


@cache
def has_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon, which Triton calls experimental, run on `device`."""
    if INTERPRETED or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] < 8:
        return False
    try:
        from quire.kernels.gemm.triton import skinny_registers  # noqa: F401
    except (ImportError, AttributeError) as error:
        logger.warning("small batches have more kernels than they need: %s", error)
        return False
    return True


@cache
def _bulk_copies(device: torch.device) -> bool:
    """Whether tiles come through the bulk copy engine, in the way of compute capability 9.0."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def adds_up(norm: tuple[torch.Tensor, float] | None, residual: torch.Tensor | None, out: torch.Tensor | None) -> bool:
    """Whether a product is a part of a sum: with the residual, or over ranks, where it goes to an `out` of a type of
    activations and has no norm before it. Such are cut up alike."""
    return residual is not None or (norm is None and out is not None and out.dtype != torch.float32)


def has_ahead(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether products of x and weight may be of the kernel whose weights are there before x is."""
    if not on_cuda(x) or INTERPRETED or x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    from quire.kernels.triton.launch import has_gluon_sm90

    aligned = x.shape[1] % 8 == len(weight) % 16 == x.stride(0) % 8 == weight.stride(0) % 8 == 0
    return aligned and has_gluon_sm90(x.device)


def plan(x: torch.Tensor, weight: torch.Tensor, *, gated: bool, residual: bool, alone: bool = False) -> Plan | None:
    """How to multiply x [m, k] by weight ([n, k], or [2n, k] if gated), with norm, gate and residual sum if asked for;
    None: not here. alone: there is no bias, and nothing that the product is added to."""
    m, k = x.shape
    if not (on_cuda(x) and m and k >= 64 and x.dtype in (torch.bfloat16, torch.float16)):
        return None
    from quire.kernels.gemm.triton.plan import MAX_ROWS, Registers, Shared, Vector
    from quire.kernels.gemm.triton.plan import plan as plan_of

    if m > MAX_ROWS:
        return None
    n = weight.shape[0] // (2 if gated else 1)
    aligned = k % 8 == x.stride(0) % 8 == weight.stride(0) % 8 == 0  # eight elements at once
    bulk, ahead = aligned and _bulk_copies(x.device), alone and has_ahead(x, weight)
    how = plan_of(m, n, k, gated=gated, residual=residual, bulk=bulk, ahead=ahead)
    if isinstance(how, Registers) and not (aligned and has_gluon(x.device)):
        return Vector(4, 512, 4) if m == 1 else Shared(16, 64, 4, 4)
    return how


def plan_8_bits(x: torch.Tensor, weight: torch.Tensor, *, gated: bool, residual: bool) -> Plan | None:
    """The same for a weight of 8 bits with a scale an output."""
    m, k = x.shape
    if not (on_cuda(x) and m and k >= 64 and x.dtype in (torch.bfloat16, torch.float16)):
        return None
    from quire.kernels.gemm.triton.plan import Registers, Shared, Vector
    from quire.kernels.gemm.triton.plan import plan_8_bits as plan_of
    from quire.kernels.triton.launch import has_gluon_sm90

    n = weight.shape[0] // (2 if gated else 1)
    aligned = k % 16 == x.stride(0) % 8 == weight.stride(0) % 16 == 0
    ring = aligned and n % 8 == 0 and not INTERPRETED and has_gluon_sm90(x.device)
    how = plan_of(m, n, k, gated=gated, residual=residual, bulk=aligned and _bulk_copies(x.device), ring=ring)
    if isinstance(how, Registers) and not (aligned and has_gluon(x.device)):
        return Vector(4, 512, 4) if m == 1 else Shared(16, 64, 4, 4)
    return how


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
    scale: torch.Tensor | None = None,
    *,
    late: bool = False,
) -> torch.Tensor:
    """See `quire.kernels.gemm.linear`. Sums are rounded once, to the result's dtype. scale: float32, of each line of a
    weight of 8 bits. late: a kernel that is launched next as a dependent one starts when x is there, and not before."""
    from quire.kernels.gemm.triton import decode_gemm

    if residual is not None:
        return decode_gemm.linear(x, weight, bias, norm, gated, True, residual, plan, scale, late=late)
    if out is None:
        n = weight.shape[0] // (2 if gated else 1)
        out = torch.empty((x.shape[0], n), dtype=out_dtype or x.dtype, device=x.device)
    return decode_gemm.linear(x, weight, bias, norm, gated, False, out, plan, scale, late=late)
