"""Products whose weights are there before x is: compiled anywhere, run where there is such a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.kernels.gemm import decode_gemm, in_parts
from quire.kernels.gemm.linear import linear, linear_reference
from quire.kernels.gemm.triton.plan import Ahead
from tests.kernels.compare import LIMITS, assert_near

pytest.importorskip("triton")

from tests.kernels.gluon import ON_DEVICE, TESTED, assert_assembles_well


@TESTED
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(("lines", "gated"), [(64, False), (32, False), (64, True), (32, True)])
def test_it_assembles_well(lines: int, gated: bool, rows: int, dtype: str, tmp_path: Path) -> None:
    from triton.experimental.gluon import language as gl

    from quire.kernels.gemm.triton import ahead_sm90 as ahead

    def desc(lines: int) -> str:
        return f"tensordesc<{dtype}[{lines}, {ahead.BLOCK_K}],{gl.NVMMASharedLayout(128, 16, 2)!r}>"

    types = {
        "x_desc": desc(ahead.BOX), "weight_desc": desc(lines), "out_ptr": f"*{dtype}", "M": "i32", "N": "i32",
        "steps": "i32", "out_stride": "i32",
    }  # fmt: skip
    consumers = rows // ahead.ROWS
    constants = {
        "ROWS": ahead.ROWS, "STAGES": ahead.stages(rows, 8192, Ahead(lines), gated=gated), "AT_ONCE": ahead.AT_ONCE,
        "GATED": gated, "CONSUMERS": consumers, "LOG2_E": ahead.LOG2_E, "PDL": True,
        "PRODUCER_REGISTERS": ahead.PRODUCER_REGISTERS, "CONSUMER_REGISTERS": ahead.CONSUMER_REGISTERS,
    }  # fmt: skip
    registers = ahead.REGISTERS[consumers - 1]
    aligned = ("out_ptr", "N", "out_stride")
    assert_assembles_well(ahead._ahead_kernel, types, constants, aligned, tmp_path, maxnreg=registers)


@TESTED
def test_a_ring_has_three_stages_or_all_steps() -> None:
    from quire.kernels.gemm.triton import ahead_sm90 as ahead

    for rows in (17, 64, 65, 128):
        for lines, gated in ((64, False), (32, False), (64, True), (32, True)):
            assert ahead.stages(rows, 8192, Ahead(lines), gated=gated) >= 3
            assert ahead.stages(rows, 130, Ahead(lines), gated=gated) == 2
    assert ahead.stages(64, 2048, Ahead(64, 8), gated=False) == 2


class TestOnDevice:
    pytestmark = ON_DEVICE

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("plan", [Ahead(64), Ahead(32), Ahead(64, 2), Ahead(64, 5)], ids=str)
    @pytest.mark.parametrize(("n", "k"), [(256, 4096), (280, 1000), (8, 136)])
    def test_products(self, n: int, k: int, plan: Ahead, dtype: torch.dtype) -> None:
        """Boxes, tiles, steps and parts that are cut off; rows that lie apart; nothing is written beyond."""
        from quire.kernels.gemm.triton import ahead_sm90

        torch.manual_seed(n)
        weight = (torch.randn(n, k + 8, device="cuda") / k**0.5).to(dtype)[:, :k]
        for m in (17, 32, 40, 64, 65, 100, 128):
            x = torch.randn(m, k + 16, device="cuda").to(dtype)[:, :k]
            whole = torch.full((m + 1, plan.parts * n + 8), 7.0, device="cuda", dtype=dtype)
            out = whole[:m, : plan.parts * n]
            ahead_sm90.linear(x, weight, out, plan, gated=False)
            exact = x.double() @ weight.double().T
            found = out.unflatten(1, (plan.parts, n)).double().sum(1)
            assert (found - exact).norm() / exact.norm() <= LIMITS[dtype] * plan.parts**0.5
            assert bool((whole[m] == 7.0).all())
            assert bool((whole[:, plan.parts * n :] == 7.0).all())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("lines", [64, 32])
    @pytest.mark.parametrize(("n", "k"), [(256, 2048), (296, 520)])
    def test_gates(self, n: int, k: int, lines: int, dtype: torch.dtype) -> None:
        from quire.kernels.gemm.triton import ahead_sm90

        torch.manual_seed(n)
        weight = (torch.randn(2 * n, k, device="cuda") * 3 / k**0.5).to(dtype)
        for m in (17, 40, 64, 72, 128):
            x = torch.randn(m, k, device="cuda").to(dtype)
            out = torch.empty(m, n, device="cuda", dtype=dtype)
            ahead_sm90.linear(x, weight, out, Ahead(lines), gated=True)
            exact = linear_reference(x.double(), weight.double(), gated=True)
            assert (out.double() - exact).norm() / exact.norm() <= LIMITS[dtype]

    def test_results_of_its_own_type(self) -> None:
        """Logits keep what the sum has gained."""
        from quire.kernels.gemm.triton import ahead_sm90

        x, weight = torch.randn(40, 512, device="cuda").bfloat16(), torch.randn(96, 512, device="cuda").bfloat16()
        out = torch.empty(40, 96, device="cuda")
        ahead_sm90.linear(x, weight, out, Ahead(64), gated=False)
        assert_near(out, x.double() @ weight.double().T, torch.float32)

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("rows", [40, 96])
    def test_layers_take_it(self, rows: int, gated: bool) -> None:
        """With a norm before it; and a weight that the rule gives it."""
        n, k = 3584 if gated else 6144, 1024
        x, gain = torch.randn(rows, k, device="cuda").bfloat16(), torch.rand(k, device="cuda").bfloat16()
        weight = (torch.randn(2 * n if gated else n, k, device="cuda") / k**0.5).bfloat16()
        how = decode_gemm.plan(x, weight, gated=gated, residual=False, alone=True)
        assert isinstance(how, Ahead) == (gated or rows <= 64)
        assert not isinstance(decode_gemm.plan(x, weight, gated=gated, residual=False), Ahead)
        y = linear(x, weight, norm=(gain, 1e-6), gated=gated)
        assert_near(y, linear_reference(x, weight, norm=(gain, 1e-6), gated=gated), torch.bfloat16)

    @pytest.mark.parametrize("rows", [24, 100])
    def test_parts(self, rows: int) -> None:
        x, weight = (torch.randn(lines, 4096, device="cuda").bfloat16() for lines in (rows, 1536))
        parts = in_parts.parts_to_rotate(x, weight)
        assert parts == in_parts.parts_to_sum(x, weight) == 5
        made = in_parts.linear(x, weight, parts)
        assert (made.parts.shape, made.parts.is_contiguous()) == ((rows, 5, 1536), True)
        exact = x.double() @ weight.double().T
        assert (made.parts.double().sum(1) - exact).norm() / exact.norm() <= 2 * LIMITS[torch.bfloat16]
