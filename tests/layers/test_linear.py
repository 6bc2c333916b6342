"""Products on the CPU: every way that `cpu_linear` may take gives what float64 gives."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu_linear import MAX_LEFT_ROWS
from quire.layers.linear import float_linear, linear

ROWS = [0, 1, 2, 7, MAX_LEFT_ROWS, MAX_LEFT_ROWS + 1]
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rows: int, dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 160, generator=generator).to(dtype)
    weight = torch.randn(72, 160, generator=generator).to(dtype)
    bias = torch.randn(72, generator=generator).to(dtype) if with_bias else None
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    for y in (linear(x, weight, bias), *([float_linear(x, weight)] if bias is None else [])):
        assert y.shape == (rows, 72)
        assert y.is_contiguous()
        if rows:
            assert (y.double() - exact).norm() / exact.norm() <= LIMITS[dtype]
    assert linear(x, weight, bias).dtype == dtype
    assert float_linear(x, weight).dtype == torch.float32


def test_float_linear_writes_where_it_is_told() -> None:
    x, weight, out = torch.randn(3, 16).bfloat16(), torch.randn(8, 16).bfloat16(), torch.zeros(3, 8)
    assert float_linear(x, weight, out) is out
    assert torch.equal(out, float_linear(x, weight))
