"""What kernels over states share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact for small ones too: log(u) · e / (u - 1) undoes the rounding of u = 1 + e."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, small)


@triton.jit
def place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr):
    """Where a row's state lies, whether there is one from before, and whether it is to be kept."""
    page = tl.load(pages_ptr + row * pages_stride).to(tl.int64)
    return page, tl.load(goes_on_ptr + row) != 0, tl.load(is_live_ptr + row) != 0


def precision(dtype: torch.dtype) -> str:
    """Of products in float32: exact ones for a model in float32, and for narrower types more than these have."""
    return "ieee" if dtype == torch.float32 else "tf32"
