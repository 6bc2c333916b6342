"""Every plan of the table, and the one-row kernel in the interpreter."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import skinny_gemm
from quire.kernels.dispatch import INTERPRETED
from quire.kernels.linear import linear, linear_reference
from quire.kernels.triton.skinny_gemm_table import TABLE, Registers, Ring, Vector, plan
from tests.kernels.compare import assert_near


@pytest.mark.skipif(not INTERPRETED, reason="only where Triton interprets its kernels")
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "k", "how"), [(48, 1024, Vector(4, 1024, 4)), (37, 1500, Vector(4, 512, 2))])
def test_one_row(n: int, k: int, how: Vector, biased: bool, gated: bool, normed: bool) -> None:
    from quire.kernels.triton import skinny_vector

    rows = 2 * n if gated else n
    x, weight = torch.randn(1, k), torch.randn(rows, k) / k**0.5
    bias, norm = torch.randn(rows) if biased else None, (torch.randn(k) + 1.0, 1e-5) if normed else None
    start = torch.randn(1, n)
    plain = skinny_vector.linear(x, weight, bias, norm, gated, False, torch.empty(1, n), how)
    assert_near(plain, linear_reference(x, weight, bias, norm=norm, gated=gated), torch.float32)
    added = skinny_vector.linear(x, weight, bias, norm, gated, True, start.clone(), how)
    expected = linear_reference(x, weight, bias, norm=norm, gated=gated, residual=start)
    assert_near(added, expected, torch.float32)


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
            if isinstance(how, Vector):
                assert bucket == 0
            elif how is not None:
                assert how.outputs % 8 == 0
                assert how.step >= 64, "a load's 8 elements times 4 threads times 2 halves of a product"
                lines = max(how.outputs * (2 if gated else 1), 16)
                if isinstance(how, Registers):
                    assert how.depth * lines * how.step // 64 <= 192, "registers a thread"
                if isinstance(how, Ring):
                    assert how.stages * how.warps * lines * how.step * 2 <= 225 * 1024, "bytes of shared memory"
            assert plan((1, 8, 16)[bucket], n, k, gated) == how


def test_pays_only_for_few_rows_on_a_gpu() -> None:
    weight = torch.randn(64, 64).bfloat16()
    assert not skinny_gemm.pays(torch.randn(1, 64).bfloat16(), weight, False)
    assert not skinny_gemm.pays(torch.randn(skinny_gemm.MAX_ROWS + 1, 64).bfloat16(), weight, False)
