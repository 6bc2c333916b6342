"""The kernels in Gluon for weights in codes of 4 bits: compiled anywhere, run where there is a device for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels.gemm import codes, grouped_linear
from quire.kernels.gemm.codes import Codes, Kind
from quire.kernels.gemm.linear import linear_reference
from tests.kernels.compare import assert_near

pytest.importorskip("triton")

from tests.kernels.gluon import ON_DEVICE, TESTED, assert_assembles_well

POINTERS = {
    "words_ptr": "*i32", "scale_ptr": "*bf16", "zero_ptr": "*u8", "outer_ptr": "*fp32", "table_ptr": "*fp32",
    "bias_ptr": "*bf16", "out_ptr": "*bf16",
}  # fmt: skip
NUMBERS = dict.fromkeys(("M", "N", "words_stride", "groups", "out_stride"), "i32")


@TESTED
@pytest.mark.parametrize("more", [
    {}, {"ONE": True, "NORM": True, "GATED": True, "OUTPUTS": 8}, {"ZERO": True, "GROUP": 32}, {"KIND": 3, "GROUP": 16},
    {"KIND": 4, "GROUP": 64}, {"OUTPUTS": 32, "COLUMNS": 16, "RESIDUAL": True},
], ids=str)  # fmt: skip
def test_few_rows_assemble_well(more: dict[str, Any], tmp_path: Path) -> None:
    """And no number of the weight changes its thread."""
    from quire.kernels.gemm.triton.code_rows import _code_rows_kernel

    types = {**POINTERS, **NUMBERS, "x_ptr": "*bf16", "gain_ptr": "*bf16", "x_stride": "i32", "eps": "fp32"}
    constants = {
        "K": 1024, "OUTPUTS": 16, "COLUMNS": 8, "DEPTH": 2, "KIND": 0, "GROUP": 128, "ZERO": False, "OUTER": False,
        "NORM": False, "GATED": False, "BIAS": False, "RESIDUAL": False, "ONE": False, "EARLY": True, "PDL": True,
    } | more  # fmt: skip
    aligned = [name for name in types if name not in ("M", "eps", "groups")]
    code = assert_assembles_well(_code_rows_kernel, types, constants, aligned, tmp_path)
    assert code.count("st.shared") <= 12  # of the warps' sums, and of x


@TESTED
@pytest.mark.parametrize("zero", [False, True])
def test_tiles_assemble_well(zero: bool, tmp_path: Path) -> None:
    from triton.experimental.gluon import language as gl

    from quire.kernels.gemm.triton.code_tiles_sm90 import _code_tiles_kernel

    types = {
        **POINTERS, **NUMBERS, "x_desc": f"tensordesc<bf16[32, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>",
        "partial_ptr": "*fp32", "counter_ptr": "*i32", "each": "i32", "blocks": "i32",
    }  # fmt: skip
    constants = {
        "STAGES": 8, "KIND": 0, "GROUP": 128, "ZERO": zero, "OUTER": False, "BIAS": True, "RESIDUAL": True,
        "AHEAD": 4, "PDL": True, "CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40,
    }  # fmt: skip
    aligned = [*POINTERS, "partial_ptr", "counter_ptr", "words_stride", "out_stride"]
    assert_assembles_well(_code_tiles_kernel, types, constants, aligned, tmp_path)


@TESTED
@pytest.mark.parametrize("more", [
    {}, {"ZERO": True}, {"x": "fp16"}, {"x": "fp16", "ZERO": True}, {"KIND": 3}, {"KIND": 4}, {"rows": 64, "STAGES": 6},
], ids=str)  # fmt: skip
def test_tall_tiles_assemble_well(more: dict[str, Any], tmp_path: Path) -> None:
    """And the matrix units are waited for three times a block: twice for the step before the last, once for all."""
    from triton.experimental.gluon import language as gl

    from quire.kernels.gemm.triton.code_tall_tiles_sm90 import WORDS_IN_SHARED, _tall_tiles_kernel

    types = {
        **POINTERS, **NUMBERS, "partial_ptr": "*fp32", "counter_ptr": "*i32", "each": "i32", "blocks": "i32",
        "x_desc": f"tensordesc<{more.get('x', 'bf16')}[{more.get('rows', 32)}, 64],"
                  f"{gl.NVMMASharedLayout(128, 16, 2)!r}>",
        "w_desc": f"tensordesc<i32[256, 16],{WORDS_IN_SHARED!r}>",
    }  # fmt: skip
    for name in ("words_ptr", "words_stride"):
        del types[name]
    constants = {
        "STAGES": 8, "KIND": 0, "GROUP": 128, "ZERO": False, "OUTER": False, "BIAS": True, "RESIDUAL": True,
        "PDL": True, "CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40,
    } | {name: value for name, value in more.items() if name.isupper()}  # fmt: skip
    aligned = [name for name in (*POINTERS, "partial_ptr", "counter_ptr", "out_stride") if name in types]
    code = assert_assembles_well(_tall_tiles_kernel, types, constants, aligned, tmp_path)
    waits = [line.split()[1] for line in code.splitlines() if "wgmma.wait_group.sync.aligned" in line]
    assert waits == 2 * ["1;", "1;", "0;"]  # of two consumers


@TESTED
@pytest.mark.parametrize(("rows", "gated", "residual"), [
    (16, True, False), (64, True, False), (16, False, True), (32, False, False), (64, False, True), (128, False, True),
])  # fmt: skip
def test_tiles_of_integers_assemble_well(rows: int, gated: bool, residual: bool, tmp_path: Path) -> None:
    """And the matrix units are waited for to the end once in a turn, of two consumers."""
    from triton.experimental.gluon import language as gl

    from quire.kernels.gemm.triton import int4_tiles_sm90 as tiles

    types = {
        "scale_ptr": "*bf16", "out_ptr": "*bf16", "partial_ptr": "*fp32", "counter_ptr": "*i32",
        **dict.fromkeys(("M", "N", "each", "blocks", "groups", "out_stride"), "i32"),
        "x_desc": f"tensordesc<bf16[{rows}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>",
        "w_desc": f"tensordesc<i32[128, 16],{tiles.WORDS_IN_SHARED!r}>",
    }  # fmt: skip
    constants = {
        "STAGES": tiles.stages(rows, gated), "GATED": gated, "RESIDUAL": residual, "TURN": tiles.TURN, "PDL": True,
        "CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40,
    }  # fmt: skip
    aligned = ["scale_ptr", "out_ptr", "partial_ptr", "counter_ptr", "out_stride"]
    code = assert_assembles_well(tiles._int4_tiles_kernel, types, constants, aligned, tmp_path)
    waits = [line.split()[1] for line in code.splitlines() if "wgmma.wait_group.sync.aligned" in line]
    assert waits == 2 * [*(4 if gated else 2) * tiles.TURN * ["1;"], "0;"]


@TESTED
def test_which_integers_have_tiles_of_their_own() -> None:
    """A rule of rows and blocks, of an H200's processors; what was not seen to be right there is not taken."""
    from quire.kernels.gemm.triton.int4_tiles_sm90 import takes

    def taken(
        rows: int, n: int, k: int, *, gated: bool = False, dtype: torch.dtype = torch.bfloat16, **more: Any
    ) -> bool:
        numbers, scale = torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 128, dtype=torch.bfloat16)
        weight = Codes("int4", 128, numbers, scale)._replace(**more)
        return takes(torch.empty(rows, k, dtype=dtype), weight, None, gated)

    assert [taken(rows, 4096, 14336) for rows in (8, 9, 384, 385)] == [False, True, True, False]
    assert [taken(rows, 4096, 4096) for rows in (16, 17)] == [False, True]
    assert [taken(rows, 28672, 4096, gated=True) for rows in (8, 9, 16, 17)] == [False, True, True, False]
    assert not taken(64, 4096, 4096, dtype=torch.float16)
    assert not taken(64, 4096, 4096, kind="nf4")
    assert not taken(64, 4096, 4096, group=64)
    assert not taken(64, 4096, 4096, zero=torch.empty(4096, 32, dtype=torch.uint8))
    assert not taken(64, 4096, 4096, scale=torch.empty(4096, 32, dtype=torch.float16))


class TestOnDevice:
    pytestmark = ON_DEVICE

    @pytest.mark.parametrize("rows", [1, 2, 5, 9, 16, 17, 40, 65, 130, 384])
    @pytest.mark.parametrize(("n", "k"), [(40, 128), (1000, 640), (136, 11008), (4096, 4096)])
    @pytest.mark.parametrize(("kind", "group", "zero"), [
        ("int4", 128, None), ("int4", 128, torch.uint8), ("int4", 32, torch.uint8), ("nf4", 64, None),
        ("e2m1", 16, None),
    ])  # fmt: skip
    def test_edges(self, kind: Kind, group: int, zero: torch.dtype | None, n: int, k: int, rows: int) -> None:
        """Blocks that are no whole turns, lines that are no whole tiles, parts of tiles; twice, for the counters."""
        weight, x, bias, start = self.made(kind, group, zero, n, k, rows)
        wide = codes.widened(weight, torch.float32)
        for _ in range(2):
            assert_near(grouped_linear.linear(x, weight, bias), linear_reference(x, wide, bias), x.dtype)
            residual = start.clone()
            grouped_linear.linear(x, weight, residual=residual)
            assert_near(residual, linear_reference(x, wide, residual=start), x.dtype)

    @pytest.mark.parametrize("rows", [17, 32, 33, 64, 100, 256])
    @pytest.mark.parametrize(("n", "k"), [(40, 128), (1000, 640), (136, 11008), (28672, 4096)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("kind", "zero"), [("int4", None), ("int4", torch.uint8), ("e2m1", None), ("nf4", None)])
    def test_tall_tiles(
        self, kind: Kind, zero: torch.dtype | None, dtype: torch.dtype, n: int, k: int, rows: int
    ) -> None:
        """Where they would not pay, too."""
        from quire.kernels.gemm.triton import code_tall_tiles_sm90

        weight, x, bias, start = self.made(kind, 128, zero, n, k, rows, dtype)
        wide = codes.widened(weight, torch.float32)
        for _ in range(2):
            found = code_tall_tiles_sm90.linear(x, weight, bias, True, start.clone())
            assert_near(found, linear_reference(x, wide, bias, residual=start), dtype)

    @pytest.mark.parametrize("rows", [9, 16, 17, 32, 33, 64, 100, 128, 256, 300])
    @pytest.mark.parametrize(("n", "k"), [(40, 128), (1000, 640), (272, 11008), (9000, 2176), (6144, 4096)])
    @pytest.mark.parametrize("gated", [False, True])
    def test_tiles_of_integers(self, gated: bool, n: int, k: int, rows: int) -> None:
        """Where they are not taken, too; parts of tiles, lines and columns that are no whole tiles and turns."""
        from quire.kernels.gemm.triton import int4_tiles_sm90

        weight, x, _, start = self.made("int4", 128, None, n, k, rows)
        outputs = n // 2 if gated else n
        start = start[:, :outputs].contiguous()
        wide = codes.widened(weight, torch.float32)
        for _ in range(2):
            found = int4_tiles_sm90.linear(x, weight, gated, False, torch.empty_like(start))
            assert_near(found, linear_reference(x, wide, gated=gated), x.dtype)
            found = int4_tiles_sm90.linear(x, weight, gated, True, start.clone())
            assert_near(found, linear_reference(x, wide, gated=gated, residual=start), x.dtype)

    def made(
        self, kind: Kind, group: int, zero: torch.dtype | None, n: int, k: int, rows: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Codes, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The weight, x [rows, k], a bias [n] and a residual [rows, n]."""
        torch.manual_seed(rows)
        found = codes.nearest(torch.randn(n, k, device="cuda") / 8, kind, group, dtype, zero, False)
        weight = Codes(kind, group, codes.packed(found.codes).contiguous(), found.scale, found.zero)
        x, start = (torch.randn(rows, size, device="cuda").to(dtype) for size in (k, n))
        return weight, x, torch.randn(n, device="cuda").to(dtype), start
