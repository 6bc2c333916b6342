"""x @ weight.T for a handful of rows, where the library's kernels leave memory bandwidth unused."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton

MAX_ROWS = 16


def pays(m: int, n: int, k: int) -> bool:
    """Whether `linear` beats the library for x [m, k] and weight [n, k] on an H200 (see benchmarks/kernels.py)."""
    return 1 <= m <= MAX_ROWS and n * k <= 2**24


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T + bias [n] → [m, n], m ≤ 16, accumulated in float32; `out_dtype` defaults to x's.

    The weight must not be written by the kernel launched just before: its first tile may be read ahead of that one.
    """
    if not on_triton(x):
        return linear_reference(x, weight, bias, out_dtype)
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"skinny linear takes 1 to {MAX_ROWS} rows, got {x.shape[0]}")
    from quire.kernels.triton import skinny_gemm

    run = skinny_gemm.vector_linear if x.shape[0] == 1 else skinny_gemm.matrix_linear
    return run(x, weight, bias, out_dtype or x.dtype)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(out_dtype or x.dtype)
