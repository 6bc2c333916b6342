"""The product down of many choices for compute capability 9.0: compiled anywhere, run where there is such a
device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.kernels.moe.experts import add_experts
from quire.kernels.moe.inside import USUAL, Gate, Inside
from tests.kernels.compare import assert_near
from tests.kernels.test_moe_experts import exact, make, routes_of

pytest.importorskip("triton")

from tests.kernels.gluon import ON_DEVICE, TESTED, assert_assembles_well


@TESTED
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_it_assembles_well(bias: bool, tmp_path: Path) -> None:
    """And what leaves it leaves in whole vectors."""
    from triton.experimental.gluon import language as gl

    from quire.kernels.gemm.triton import pipeline_sm90 as pipeline
    from quire.kernels.moe.triton.grouped_sm90 import _down_sm90_kernel

    half_m, half_n, block_k = pipeline.BLOCK_M // 2, pipeline.BLOCK_N // 2, pipeline.BLOCK_K
    weight = f"tensordesc<bf16[{half_n // 32}, 4, 4, 2, {block_k}],{gl.NVMMASharedLayout(128, 16, 5)!r}>"
    types = {
        "x_desc": f"tensordesc<bf16[{half_m}, {block_k}],{gl.NVMMASharedLayout(128, 16, 2)!r}>",
        "weight_desc": weight, "bias_ptr": "*bf16", "share_ptr": "*fp32", "order_ptr": "*i32", "tiles_ptr": "*i32",
        "out_ptr": "*bf16", "most": "i32", "K": "i32",
    }  # fmt: skip
    constants = {name: value for name, value in pipeline.OPTIONS.items() if name not in ("num_warps", "GROUP_M")}
    constants |= {"N": 2048, "HALF_N": half_n, "BIAS": bias, "PDL": True}
    aligned = ("bias_ptr", "share_ptr", "order_ptr", "tiles_ptr", "out_ptr")
    code = assert_assembles_well(_down_sm90_kernel, types, constants, aligned, tmp_path)
    assert code.count("st.global.v4") == code.count("st.global") > 0


class TestOnDevice:
    pytestmark = ON_DEVICE

    @pytest.mark.parametrize("dead", [0, 700])
    @pytest.mark.parametrize("tokens", [900, 3000])
    @pytest.mark.parametrize(("hidden", "inner"), [(512, 256), (200, 96), (1000, 352)])
    def test_edges(self, hidden: int, inner: int, tokens: int, dead: int) -> None:
        """Experts of nobody and of everybody; tiles, steps and weights that are cut off; padding."""
        torch.manual_seed(tokens)
        x, gate_up, down, residual = make(9, tokens, torch.device("cuda"), hidden, inner, torch.bfloat16)
        routes = routes_of(9, tokens, 3, torch.device("cuda"), dead)
        assert routes.tiling is not None
        assert routes.tiling.rows == 128
        wanted = exact(x, routes, gate_up, down, residual)
        assert_near(add_experts(x, routes, gate_up, down, residual), wanted, torch.bfloat16)

    @pytest.mark.parametrize("gate", [Gate(), Gate(alpha=1.702, limit=1.5, shift=1.0)], ids=str)
    def test_biases_and_another_gate(self, gate: Gate) -> None:
        x, gate_up, down, residual = make(4, 700, torch.device("cuda"), 256, 160, torch.bfloat16)
        biases = [torch.randn(4, lines, device="cuda", dtype=torch.bfloat16) for lines in (320, 256)]
        routes, inside = routes_of(4, 700, 2, torch.device("cuda")), Inside(gate, *biases)
        wanted = exact(x, routes, gate_up, down, residual, inside)
        assert inside != USUAL
        assert_near(add_experts(x, routes, gate_up, down, residual, inside=inside), wanted, torch.bfloat16)
