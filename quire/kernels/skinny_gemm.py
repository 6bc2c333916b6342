"""x @ weight.T for a handful of rows, where the library's kernels leave memory bandwidth unused."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton

MAX_ROWS = 16


def pays(m: int, n: int, k: int) -> bool:
    """Whether `linear` beats the library for x [m, k] and weight [n, k], as measured on an H200."""
    return k >= 256 and (1 <= m <= 8 or (m <= MAX_ROWS and n <= 4096))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T + bias [n] → [m, n], m ≤ 16, accumulated in float32; rows contiguous.

    The result goes into `out` (contiguous, of any float dtype) if given, else into a tensor of `out_dtype`, by
    default x's.

    The weight must not be written by the kernel launched just before: its rows' heads are read ahead of that one's end.
    """
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype or x.dtype, device=x.device)
    if not on_triton(x):
        return out.copy_(linear_reference(x, weight, bias))
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"skinny linear takes 1 to {MAX_ROWS} rows, got {x.shape[0]}")
    from quire.kernels.triton import skinny_gemm

    return skinny_gemm.linear(x, weight, bias, out)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float32."""
    y = x.float() @ weight.float().T
    return y if bias is None else y + bias.float()
