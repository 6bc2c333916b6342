"""x @ weight.T for up to 16 rows: the kernel that the table names."""

from __future__ import annotations

import torch

from quire.kernels.triton import skinny_matrix, skinny_vector
from quire.kernels.triton.skinny_gemm_table import Plan, Vector, plan


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    how: Plan | None = None,
) -> torch.Tensor:
    """x [m, k] → out [m, n]; with `residual` the result is added to what stands there. `how` is for measuring.

    See `quire.kernels.linear`. Raises ValueError where the table leaves it to the library.
    """
    (m, k), n = x.shape, out.shape[1]
    how = how or plan(m, n, k, gated)
    if how is None:
        raise ValueError(f"no kernel for {m} rows of {k} and {n} outputs")
    if isinstance(how, Vector):
        return skinny_vector.linear(x, weight, bias, norm, gated, residual, out, how)
    return skinny_matrix.linear(x, weight, bias, norm, gated, residual, out, how)
