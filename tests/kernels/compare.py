"""How results are judged: against float64, by the error's share of the whole."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import INTERPRETED

# Triton's interpreter multiplies bfloat16 matrices as if they were integers.
NARROW = torch.float16 if INTERPRETED else torch.bfloat16
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def assert_near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """||result - expected|| / ||expected|| within what rounding to `dtype` explains; NaN never passes."""
    assert result.shape == expected.shape
    wide = expected.double().cpu()
    error = torch.linalg.vector_norm(result.double().cpu() - wide) / torch.linalg.vector_norm(wide)
    assert error <= LIMITS[dtype], f"relative error {error:.2e} is more than {LIMITS[dtype]:.1e}"
