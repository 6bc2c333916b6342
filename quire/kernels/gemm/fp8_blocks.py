"""x @ weight.T for a weight of 8-bit floats whose every 128 columns have a scale, of more than a few rows: widened in
front of the matrix units it would hold them up, so x is rounded to 8 bits too, with a scale for 128 columns of each
row, as such checkpoints mean it, and the library multiplies."""

from __future__ import annotations

from functools import cache

import torch

from quire.kernels.dispatch import device_on_cuda
from quire.kernels.elementwise.activation import silu_and_mul
from quire.kernels.gemm.codes import BLOCK, Codes
from quire.kernels.gemm.fp8_linear import UNIT

FEWEST_ROWS = 9  # fewer are multiplied as they are


def takes(x: torch.Tensor, weight: Codes) -> bool:
    """Whether `linear` multiplies these."""
    if not device_on_cuda(x.device) or len(x) < FEWEST_ROWS or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    alike = weight.kind == "e4m3" and weight.group == BLOCK and weight.zero is weight.outer is None
    whole = weight.columns % BLOCK == 0 and len(weight.codes) % UNIT == 0 and x.stride(1) == 1
    return alike and whole and weight.scale.dtype == torch.float32 and _multiplies_blocks(x.device)


@cache
def _multiplies_blocks(device: torch.device) -> bool:
    """Whether the library knows such scales there: that of CUDA 12.9, on compute capability 9.0."""
    version = tuple(int(number) for number in (torch.version.cuda or "0.0").split("."))
    return version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def linear(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None,
    *,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """What it `takes`; see `quire.kernels.gemm.linear`."""
    from quire.kernels.gemm.triton import fp8_blocks

    m, rows = len(x), -(-len(x) // UNIT) * UNIT
    values, scale, turned = fp8_blocks.prepared(x, norm, rows, weight.scale)
    kind = torch.nn.functional.ScalingType.BlockWise1x128
    y = torch.nn.functional.scaled_mm(
        values, weight.codes.t(), scale.t(), kind, turned.t(), kind,
        output_dtype=out_dtype or (x.dtype if out is None else out.dtype),
    )[:m]  # fmt: skip
    if bias is not None:
        y = y.add_(bias)
    if gated:
        return silu_and_mul(y)
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)
