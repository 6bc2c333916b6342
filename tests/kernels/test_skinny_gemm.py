from __future__ import annotations

import pytest
import torch

from quire.kernels import skinny_gemm
from tests.kernels.compare import NARROW, assert_near


@pytest.mark.parametrize("dtype", sorted({NARROW, torch.float16}, key=str))
@pytest.mark.parametrize("m", [1, 2, 3, 8, 11, 16])
@pytest.mark.parametrize(("n", "k", "biased"), [(48, 1024, True), (37, 96, False), (130, 1500, True)])
def test_linear(device: torch.device, m: int, n: int, k: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    bias = torch.randn(n, device=device, dtype=dtype) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    y = skinny_gemm.linear(x, weight, bias)
    assert y.dtype == dtype
    assert_near(y, expected, dtype)
    wide = skinny_gemm.linear(x, weight, bias, torch.float32)
    assert wide.dtype == torch.float32
    assert_near(wide, expected, torch.float32)
    out = torch.empty_like(wide)
    assert skinny_gemm.linear(x, weight, bias, out=out) is out
    assert torch.equal(out, wide)


def test_pays_only_for_few_rows() -> None:
    assert skinny_gemm.pays(1, 1024, 2048)
    assert not skinny_gemm.pays(skinny_gemm.MAX_ROWS + 1, 1024, 2048)
