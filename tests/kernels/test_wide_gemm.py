"""The gated product of many rows for compute capability 9.0: compiled anywhere, run where there is such a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.kernels.gemm.linear import linear, linear_reference
from tests.kernels.compare import LIMITS

pytest.importorskip("triton")

from tests.kernels.gluon import ON_DEVICE, TESTED, assert_assembles_well


@TESTED
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_assembles_well(dtype: str, tmp_path: Path) -> None:
    from triton.experimental.gluon import language as gl

    from quire.kernels.attention.triton.decode import LOG2_E
    from quire.kernels.gemm.triton import pipeline_sm90 as pipeline
    from quire.kernels.gemm.triton.wide_gemm_sm90 import _gated_sm90_kernel

    def desc(rows: int, columns: int) -> str:
        return f"tensordesc<{dtype}[{rows}, {columns}],{gl.NVMMASharedLayout(128, 16, 2)!r}>"

    half_m, half_n = pipeline.BLOCK_M // 2, pipeline.BLOCK_N // 2
    types = {
        "x_desc": desc(half_m, pipeline.BLOCK_K), "weight_desc": desc(half_n, pipeline.BLOCK_K),
        "out_desc": desc(half_m, half_n), "M": "i32", "N": "i32", "K": "i32",
    }  # fmt: skip
    constants = {name: value for name, value in pipeline.OPTIONS.items() if name != "num_warps"}
    constants |= {"LOG2_E": LOG2_E, "PDL": True}
    assert_assembles_well(_gated_sm90_kernel, types, constants, (), tmp_path)


class TestOnDevice:
    pytestmark = ON_DEVICE

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 64), (129, 344, 1000), (3000, 3072, 1024), (777, 8, 8)])
    def test_edges(self, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        """One tile and several a block; tiles, steps and weights that are cut off; rows that lie apart."""
        from quire.kernels.gemm.triton import wide_gemm_sm90

        torch.manual_seed(m)
        x = torch.randn(m, k + 16, device="cuda").to(dtype)[:, :k]
        weight = (torch.randn(2 * n, k + 8, device="cuda") * 3 / k**0.5).to(dtype)[:, :k]
        weight[0] = 0
        y = wide_gemm_sm90.gated(x, weight)
        exact = linear_reference(x.double(), weight.double(), gated=True)
        assert (y.double() - exact).norm() / exact.norm() <= LIMITS[dtype]

    @pytest.mark.parametrize("rows", [300, 4096])
    def test_far_from_zero(self, rows: int) -> None:
        """Gates so small and so large that their exponentials leave float32's range."""
        x = torch.full((rows, 64), 30.0, device="cuda", dtype=torch.bfloat16)
        weight = torch.cat([torch.linspace(-1, 1, 3072)[:, None].expand(-1, 64), torch.ones(3072, 64)])
        y = linear(x, weight.to(x), gated=True)
        exact = linear_reference(x, weight.to(x), gated=True)
        assert torch.isfinite(y).all()
        assert (y.float() - exact).norm() / exact.norm() <= LIMITS[torch.bfloat16]
