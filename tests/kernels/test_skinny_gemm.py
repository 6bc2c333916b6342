"""Every plan of the table, and the kernels that Triton's interpreter can run."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import skinny_gemm
from quire.kernels.dispatch import INTERPRETED
from quire.kernels.linear import linear, linear_reference
from quire.kernels.triton.skinny_gemm_table import TABLE, Plan, Registers, Shared, Vector, plan
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
    if device.type == "cpu" and (not INTERPRETED or isinstance(how, Registers)):
        pytest.skip("the kernels need a GPU, or an interpreter")
    if isinstance(how, Vector) and m > 1:
        pytest.skip("one row")
    from quire.kernels.triton import skinny_gemm as kernels

    x, weight = torch.randn(m, k, device=device).to(NARROW), torch.randn(n, k, device=device).to(NARROW)
    bias = torch.randn(n, device=device).to(NARROW) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    for dtype in (NARROW, torch.float32):
        out = torch.full((m, n), torch.nan, device=device, dtype=dtype)
        assert_near(kernels.linear(x, weight, bias, None, False, False, out, how), expected, dtype)
        start = torch.randn(m, n, device=device).to(dtype)
        y = kernels.linear(x, weight, bias, None, False, True, start.clone(), how)
        assert_near(y, expected + start, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 16])
@pytest.mark.parametrize(("k", "n", "gated"), list(TABLE))
def test_every_plan(k: int, n: int, gated: bool, m: int) -> None:
    torch.manual_seed(m)
    x, gain = torch.randn(m, k, device="cuda").bfloat16(), (torch.rand(k, device="cuda") + 0.5).bfloat16()
    weight = (torch.randn(2 * n if gated else n, k, device="cuda") / k**0.5).bfloat16()
    expected = linear_reference(x, weight, norm=(gain, 1e-6), gated=gated)
    y = linear(x, weight, norm=(gain, 1e-6), gated=gated)
    assert_near(y, expected, torch.bfloat16)
    assert torch.equal(linear(x, weight, norm=(gain, 1e-6), gated=gated), y), "not the same twice"


def test_plans_fit_the_hardware() -> None:
    for (k, n, gated), plans in TABLE.items():
        for bucket, how in enumerate(plans):
            assert plan((1, 8, 16)[bucket], n, k, gated) == how
            if isinstance(how, Vector):
                assert bucket == 0
            if isinstance(how, Shared):
                assert how.stages * how.warps * (how.outputs + 16) * how.step * 2 <= 225 * 1024, "bytes shared"
            if isinstance(how, Registers):
                lines = max(how.outputs * (2 if gated else 1), 16)
                assert how.outputs % 8 == 0
                assert how.step % 64 == 0
                assert how.depth * lines * how.step // 64 <= 192, "registers a thread"


def test_no_plan_without_a_gpu() -> None:
    x, weight = torch.randn(1, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    assert skinny_gemm.plan(x, weight, normed=False, gated=False) is None
