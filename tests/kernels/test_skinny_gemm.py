"""Kernels for up to 16 rows: those that Triton's interpreter can run, and on a GPU all."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.dispatch import device_on_triton
from quire.kernels.gemm.linear import linear_reference
from quire.kernels.gemm.triton.plan import Plan, Registers, Shared, Vector
from tests.kernels.compare import NARROW, assert_near

PLANS = [
    Vector(4, 512, 2),
    Shared(16, 64, 4, 4),
    Shared(16, 128, 2, 4),
    Registers(16, 128, 2, 4),
    Registers(8, 64, 3, 8),
]


@pytest.mark.parametrize("m", [1, 2, 3, 8, 11, 16])
@pytest.mark.parametrize("how", PLANS, ids=str)
@pytest.mark.parametrize(("n", "k", "biased"), [(48, 1024, True), (37, 96, False), (130, 1504, True)])
def test_kernels(device: torch.device, m: int, n: int, k: int, biased: bool, how: Plan) -> None:
    if not device_on_triton(device) or (device.type == "cpu" and isinstance(how, Registers)):
        pytest.skip("the kernels need a GPU, or an interpreter")
    if isinstance(how, Vector) and m > 1:
        pytest.skip("one row")
    from quire.kernels.gemm.triton import decode_gemm as kernels

    x, weight = torch.randn(m, k, device=device).to(NARROW), torch.randn(n, k, device=device).to(NARROW)
    bias = torch.randn(n, device=device).to(NARROW) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    for dtype in (NARROW, torch.float32):
        out = torch.full((m, n), torch.nan, device=device, dtype=dtype)
        assert_near(kernels.linear(x, weight, bias, None, False, False, out, how), expected, dtype)
        start = torch.randn(m, n, device=device).to(dtype)
        y = kernels.linear(x, weight, bias, None, False, True, start.clone(), how)
        assert_near(y, expected + start, dtype)


@pytest.mark.parametrize("how", PLANS, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("m", "n", "k", "biased"), [(1, 48, 1024, True), (1, 37, 600, False), (6, 70, 512, True)])
def test_norm_and_gate(device: torch.device, m: int, n: int, k: int, biased: bool, gated: bool, how: Plan) -> None:
    if not device_on_triton(device) or (device.type == "cpu" and isinstance(how, Registers)):
        pytest.skip("the kernels need a GPU, or an interpreter")
    if isinstance(how, Vector) and m > 1:
        pytest.skip("one row")
    from quire.kernels.gemm.triton import decode_gemm as kernels

    lines = 2 * n if gated else n
    x = 3.0 * torch.randn(m, k, device=device).to(NARROW)
    weight = (torch.randn(lines, k, device=device) / k**0.5).to(NARROW)
    bias = torch.randn(lines, device=device).to(NARROW) if biased else None
    gain = (torch.rand(k, device=device) + 0.5).to(NARROW)
    out = torch.full((m, n), torch.nan, device=device, dtype=NARROW)
    expected = linear_reference(x, weight, bias, norm=(gain, 1e-5), gated=gated)
    assert_near(kernels.linear(x, weight, bias, (gain, 1e-5), gated, False, out, how), expected, NARROW)
