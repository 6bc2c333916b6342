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
HEAD = {"KIND": 1, "GROUP": 1 << 20, "scale_ptr": "*fp32", "WIDE": True}
CODES_IN_BYTES = [
    (torch.bfloat16, None, None),
    (torch.float16, None, None),
    (torch.bfloat16, None, torch.float32),
    (torch.bfloat16, torch.uint8, None),
    (torch.float16, torch.float16, None),
    (torch.bfloat16, torch.float32, torch.float32),
]  # types of x, zeros and scales
NUMBERS = dict.fromkeys(("M", "N", "words_stride", "groups", "out_stride"), "i32")


@TESTED
@pytest.mark.parametrize("more", [
    {}, {"ONE": True, "NORM": True, "GATED": True, "OUTPUTS": 8}, {"ZERO": True, "GROUP": 32}, {"KIND": 3, "GROUP": 16},
    {"ZERO": True, "zero_ptr": "*fp32", "GROUP": 32}, {"ZERO": True, "zero_ptr": "*fp32", "GROUP": 32, "ONE": True},
    {"KIND": 4, "GROUP": 64}, {"OUTPUTS": 32, "COLUMNS": 16, "RESIDUAL": True},
    {"KIND": 3, "GROUP": 32, "K": 1440, "scale_ptr": "*i16"},
], ids=str)  # fmt: skip
def test_few_rows_assemble_well(more: dict[str, Any], tmp_path: Path) -> None:
    """And no number of the weight changes its thread."""
    from quire.kernels.gemm.triton.code_rows import _code_rows_kernel

    types = {**POINTERS, **NUMBERS, "x_ptr": "*bf16", "gain_ptr": "*bf16", "x_stride": "i32", "eps": "fp32"}
    constants = {
        "K": 1024, "OUTPUTS": 16, "COLUMNS": 8, "DEPTH": 2, "RING": 2, "KIND": 0, "GROUP": 128, "ZERO": False,
        "OUTER": False, "NORM": False, "GATED": False, "BIAS": False, "RESIDUAL": False, "ONE": False, "EARLY": True,
        "PDL": True,
    } | {name: value for name, value in more.items() if name.isupper()}  # fmt: skip
    types |= {name: value for name, value in more.items() if name in types}
    aligned = [name for name in types if name not in ("M", "eps", "groups")]
    code = assert_assembles_well(_code_rows_kernel, types, constants, aligned, tmp_path, 16)
    assert code.count("st.shared") <= 12  # of the warps' sums, and of x


@TESTED
@pytest.mark.parametrize("more", [
    {"rows": 16, "GATED": True}, {"rows": 64, "GATED": True}, {"GATED": True},
    {"rows": 16, "HALVES": 1, "RESIDUAL": True},
    {"rows": 32, "HALVES": 1}, {"rows": 64, "HALVES": 1, "RESIDUAL": True}, {"HALVES": 1, "RESIDUAL": True},
    {"RESIDUAL": True}, {"KIND": 4, "GROUP": 64}, {"KIND": 3, "GROUP": 32},
    {"KIND": 3, "GROUP": 32, "TAIL": 2, "scale_ptr": "*i16"}, {"KIND": 1, "HALVES": 1, "RESIDUAL": True},
    {"dtype": "fp16", "rows": 64, "HALVES": 1}, {"dtype": "fp16", "GATED": True},
    *({**HEAD, "rows": rows, "HALVES": halves} for rows in (16, 64, 128) for halves in (1, 2)),
    {**HEAD, "rows": 64, "HALVES": 1, "BIAS": True}, {**HEAD, "dtype": "fp16", "HALVES": 1}, {"WIDE": True},
], ids=str)  # fmt: skip
def test_tiles_with_gates_assemble_well(more: dict[str, Any], tmp_path: Path) -> None:
    """And the matrix units are waited for to the end once in a turn, of two consumers."""
    from triton.experimental.gluon import language as gl

    from quire.kernels.gemm.triton import code_gemm_sm90 as tiles

    rows, dtype, swizzled = more.get("rows", 128), more.get("dtype", "bf16"), gl.NVMMASharedLayout(128, 16, 2)
    is_bytes = more.get("KIND", 0) in (1, 2)
    codes_of = f"i16[128, 32],{tiles.BYTES_IN_SHARED!r}" if is_bytes else f"i32[128, 16],{tiles.WORDS_IN_SHARED!r}"
    types = {
        **POINTERS, "partial_ptr": "*fp32", "counter_ptr": "*i32", "w_desc": f"tensordesc<{codes_of}>",
        **dict.fromkeys(("M", "N", "out_stride", "waves", "each", "blocks", "groups", "tail"), "i32"),
        **dict.fromkeys(("x_desc", "out"), f"tensordesc<{dtype}[{rows}, 64],{swizzled!r}>"),
        "scale_ptr": f"*{dtype}",
    }  # fmt: skip
    for name in ("words_ptr", "out_ptr"):
        del types[name]
    types |= {name: value for name, value in more.items() if name in types}
    if more.get("WIDE"):
        types["out"] = "*fp32"
    constants = {
        "TAIL": 0, "KIND": 0, "GROUP": 128, "ZERO": False, "OUTER": False, "BIAS": False, "GATED": False,
        "RESIDUAL": False, "WIDE": False,
        "HALVES": 2, "TURN": tiles.TURN, "GROUP_M": tiles.GROUP_M, "LOG2_E": tiles.LOG2_E, "PDL": True,
        "CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40,
    } | {name: value for name, value in more.items() if name.isupper()}  # fmt: skip
    how = tiles.Plan(rows, constants["HALVES"], 0)
    constants["STAGES"] = tiles.stages(how, gated=constants["GATED"], nibbles=not is_bytes, wide=constants["WIDE"])
    aligned = [name for name in types if name.endswith("_ptr")]
    few = constants["HALVES"] == 1 or (constants["KIND"] == 0 and not constants["WIDE"])
    spilled = 0 if few else 64  # no more than a few numbers of a tile
    code = assert_assembles_well(tiles._code_gemm_kernel, types, constants, aligned, tmp_path, spilled)
    waits = [line.split()[1] for line in code.splitlines() if "wgmma.wait_group.sync.aligned" in line]
    assert waits == 2 * [*2 * constants["HALVES"] * tiles.TURN * ["1;"], "0;"]
    if constants["WIDE"]:  # each number by itself, from the thread that has its sum
        assert code.count("st.global.b32") == constants["HALVES"] * rows
        assert code.count("st.shared") < 8


@TESTED
@pytest.mark.parametrize("more", [
    {"GATED": True, "NORM": True}, {"GATED": True, "NORM": True, "ZERO": True, "BIAS": True, "OUTER": True},
    {"K": 14336, "RESIDUAL": True, "warps": 16}, {"K": 28672, "RESIDUAL": True, "ZERO": True},
    {"K": 3584, "NORM": True, "COPIED": False, "scale_ptr": "*fp32", "warps": 16},
    {"K": 2560, "NORM": True, "COPIED": False, "ZERO": True, "zero_ptr": "*fp16", "BIAS": True},
], ids=str)  # fmt: skip
def test_a_row_of_bytes_assembles_well(more: dict[str, Any], tmp_path: Path) -> None:
    """Products are of bytes, as many as there are numbers, and nothing is spilled."""
    from quire.kernels.gemm.triton import code_ring_sm90 as ring

    warps = more.get("warps", 8)
    types = {
        "x_ptr": "*bf16", "w_desc": f"tensordesc<i32[2, 8, {16 * warps}],{ring.WORDS_IN_SHARED!r}>",
        "scale_desc": f"tensordesc<bf16[2, 8, {warps}],{ring.SCALES_IN_SHARED!r}>", "scale_ptr": "*bf16",
        "zero_ptr": "*u8", "outer_ptr": "*fp32", "bias_ptr": "*bf16", "gain_ptr": "*bf16", "out_ptr": "*bf16",
        "N": "i32", "blocks": "i32", "units": "i32", "eps": "fp32",
    } | {name: value for name, value in more.items() if name.endswith("_ptr")}  # fmt: skip
    constants = {
        "K": 4096, "STAGES": 4, "COPIED": True, "ZERO": False, "OUTER": False, "NORM": False, "GATED": False,
        "BIAS": False, "RESIDUAL": False, "PDL": True, **ring.OPTIONS,
    } | {name: value for name, value in more.items() if name.isupper()}  # fmt: skip
    if not constants["COPIED"]:
        types["scale_desc"] = types["scale_ptr"]
    aligned = [name for name in types if name.endswith("_ptr")]
    code = assert_assembles_well(
        ring._code_ring_kernel, types, constants, aligned, tmp_path, num_warps=warps, maxnreg=ring.REGISTERS
    )  # fmt: skip
    products = [line for line in code.splitlines() if "mma.sync" in line]
    assert len(products) == 4
    assert all("m16n8k32" in line and ".s32.s8.s8.s32" in line for line in products)


@TESTED
def test_which_codes_are_multiplied_as_bytes() -> None:
    from quire.kernels.gemm.triton.code_ring_sm90 import Plan, plan, takes

    def taken(n: int, k: int, *, rows: int = 1, gated: bool = False, residual: bool = False, **more: Any) -> bool:
        numbers, scale = torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 128, dtype=torch.bfloat16)
        weight = Codes("int4", 128, numbers, scale)._replace(**more)
        return takes(torch.empty(rows, k, dtype=torch.bfloat16), weight, gated, residual)

    assert [taken(6144, 4096, rows=rows) for rows in (1, 2)] == [True, False]
    assert taken(28672, 4096, gated=True)
    assert [taken(n, k, residual=True) for n, k in ((4096, 4096), (4096, 14336), (8192, 8192))] == [False, True, True]
    assert not taken(2048, 2048)  # too little
    assert not taken(6148, 4096)
    assert not taken(6144, 4160)
    assert taken(6144, 3584)
    assert taken(6144, 4096, zero=torch.empty(6144, 32, dtype=torch.uint8))
    for more in ({"kind": "nf4"}, {"group": 64}, {"scale": torch.empty(6144, 32, dtype=torch.uint8)}):
        assert not taken(6144, 4096, **more)
    assert [plan(k, gated=True) for k in (4096, 8192)] == [Plan(5, 2, 8), Plan(5, 1, 16)]
    assert [plan(k, gated=False).warps for k in (2560, 3584, 4096)] == [8, 16, 16]


@TESTED
def test_which_codes_have_tiles_with_gates() -> None:
    """A rule of rows and blocks, of an H200's processors."""
    from quire.kernels.gemm.triton.code_gemm_sm90 import takes

    def taken(
        rows: int, n: int, k: int, *, gated: bool = False, dtype: torch.dtype = torch.bfloat16, **more: Any
    ) -> bool:
        numbers, scale = torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 128, dtype=torch.bfloat16)
        weight = Codes("int4", 128, numbers, scale)._replace(**more)
        return takes(torch.empty(rows, k, dtype=dtype), weight, gated, None)

    assert [taken(rows, 4096, 14336) for rows in (8, 9, 384, 8192)] == [False, True, True, True]
    assert [taken(rows, 4096, 4096) for rows in (16, 17)] == [False, True]
    assert [taken(rows, 28672, 4096, gated=True) for rows in (8, 9, 8192)] == [False, True, True]
    assert taken(16, 4096, 14336, zero=torch.empty(4096, 112, dtype=torch.uint8))
    assert [taken(16, 28672, 4096, kind="nf4", group=64, gated=gated) for gated in (False, True)] == [True, False]
    assert taken(16, 4096, 4096, kind="int8", codes=torch.empty(4096, 4096, dtype=torch.int8))
    for more in ({"kind": "nf4"}, {"group": 64}, {"zero": torch.empty(4096, 32, dtype=torch.uint8)}):
        assert [taken(rows, 4096, 4096, **more) for rows in (64, 8192)] == [True, False]  # where widening pays
    assert not taken(64, 4096, 4096, group=16)
    assert not taken(64, 4100, 4096)  # the copy engine writes no such lines
    whole = Codes("int8", 4096, torch.empty(32001, 4096, dtype=torch.int8), torch.empty(32001, 1))
    x, out = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(64, 32003)[:, 1:32002]
    assert [takes(x, whole, False, out, wide=wide) for wide in (False, True)] == [False, True]


def test_tiles_are_those_that_take_the_least_time() -> None:
    """Whole ones where they fill their rounds, else some are shared; smaller ones where there is little to do."""
    from quire.kernels.gemm.triton.code_plan import Plan, plan

    def planned(m: int, n: int, k: int, *, gated: bool = False, plain: bool = True) -> Plan:
        return plan(m, n, k, gated=gated, plain=plain, processors=132)

    assert [planned(m, 14336, 4096, gated=True) for m in (16, 64)] == [Plan(16, 2, 1), Plan(64, 2, 1)]  # 112 tiles
    assert planned(64, 14336, 4096, gated=True, plain=False) == Plan(64, 2, 0)
    assert [planned(64, n, k, gated=True).waves for n, k in ((9728, 2560), (18944, 3584))] == [0, 0]  # 76 and 148
    assert planned(128, 14336, 4096, gated=True) == Plan(128, 2, 1)
    assert planned(512, 14336, 4096, gated=True) == Plan(128, 2, 2)  # 448 tiles: two rounds, and 184 are shared
    assert planned(128, 4096, 4096) == Plan(64, 1, 0)
    assert planned(512, 4096, 14336) == Plan(128, 1, 1)
    assert planned(1024, 4096, 14336) == Plan(128, 2, 1)


class TestOnDevice:
    pytestmark = ON_DEVICE

    @pytest.mark.parametrize("rows", [1, 2, 5, 9, 16, 17, 40, 65, 130, 384])
    @pytest.mark.parametrize(("n", "k"), [(40, 128), (1000, 640), (136, 11008), (4096, 4096)])
    @pytest.mark.parametrize(("kind", "group", "zero"), [
        ("int4", 128, None), ("int4", 128, torch.uint8), ("int4", 32, torch.uint8), ("nf4", 64, None),
        ("e2m1", 16, None), ("int4", 32, torch.float32),
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

    @pytest.mark.parametrize("rows", [1, 5, 12, 17, 40, 130, 700])
    @pytest.mark.parametrize(("n", "k"), [(48, 160), (5120, 2880), (136, 4544)])
    @pytest.mark.parametrize(("kind", "group", "scale"), [
        ("e2m1", 32, torch.uint8), ("int4", 128, None), ("nf4", 64, None), ("int4", 32, None),
    ])  # fmt: skip
    def test_rows_that_end_amid_a_block(
        self, kind: Kind, group: int, scale: torch.dtype | None, n: int, k: int, rows: int
    ) -> None:
        weight, x, bias, start = self.made(kind, group, None, n, k, rows, scale=scale)
        wide, gain = codes.widened(weight, torch.float32), torch.rand(k, device="cuda").to(x.dtype)
        found = grouped_linear.linear(x, weight, bias, norm=(gain, 1e-5))
        assert_near(found, linear_reference(x, wide, bias, norm=(gain, 1e-5)), x.dtype)
        assert_near(grouped_linear.linear(x, weight, gated=True), linear_reference(x, wide, gated=True), x.dtype)
        residual = start.clone()
        grouped_linear.linear(x, weight, residual=residual)
        assert_near(residual, linear_reference(x, wide, residual=start), x.dtype)

    @pytest.mark.parametrize(("n", "k"), [(40, 2048), (1008, 2176), (272, 11008), (2112, 4096), (4096, 14336)])
    @pytest.mark.parametrize(("dtype", "zero", "scale"), CODES_IN_BYTES, ids=str)
    def test_a_row_of_bytes(
        self, dtype: torch.dtype, zero: torch.dtype | None, scale: torch.dtype | None, n: int, k: int
    ) -> None:
        """Closer than activations' type: what rounds x is 2^-16 of a block's largest. Lines that are no whole unit,
        steps that are no whole row, one number that is far from the others; twice, as the ring is used again."""
        from quire.kernels.gemm.triton import code_ring_sm90 as ring

        weight, x, bias, start = self.made("int4", 128, zero, n, k, 1, dtype, scale)
        weight = weight._replace(outer=torch.rand(n, device="cuda") + 0.5)
        x[0, 5], gain = 300.0, torch.randn(k, device="cuda").to(dtype)
        wide = codes.widened(weight, torch.float64)
        rows = x.double() * (x.double().square().mean() + 1e-5).rsqrt() * gain.double()
        added = start.double() + x.double() @ wide.T
        plain, (gates, ups) = rows @ wide.T + bias.double(), (rows @ wide.T).chunk(2, dim=1)
        wanted = {"plain": plain, "gated": torch.nn.functional.silu(gates) * ups, "added": added}
        for how in (ring.Plan(3, 2, 8), ring.Plan(3, 1, 16)) * 2:
            found = {
                "plain": ring.linear(x, weight, bias, (gain, 1e-5), False, False, start.float(), how),
                "gated": ring.linear(x, weight, None, (gain, 1e-5), True, False, start[:, : n // 2].float(), how),
                "added": ring.linear(x, weight, None, None, False, True, start.float(), how),
            }
            for name, y in found.items():
                off = (y.double() - wanted[name]).abs().max() / wanted[name].abs().max()
                assert off < 5e-4, (name, how)

    @pytest.mark.parametrize(("n", "k", "gated"), [(4096, 14336, False), (4096, 4096, False), (14336, 4096, True)])
    @pytest.mark.parametrize(("dtype", "zero", "scale"), CODES_IN_BYTES, ids=str)
    def test_a_row_of_bytes_comes_out_alike(
        self, dtype: torch.dtype, zero: torch.dtype | None, scale: torch.dtype | None, n: int, k: int, gated: bool
    ) -> None:
        """Bit for bit, however long memory takes: one behind the other, each let in before the last has ended, and
        beside a stream that keeps memory busy. Words that the copy engine writes over before they are read come out
        otherwise; that happened to two rows in three where scales are asked for one by one."""
        from quire.kernels.gemm.triton import code_ring_sm90 as ring

        weight, x, _, start = self.made("int4", 128, zero, 2 * n if gated else n, k, 1, dtype, scale)
        gain = torch.randn(k, device="cuda").to(dtype)
        outs = [torch.full((1, n), torch.nan, device="cuda", dtype=start.dtype) for _ in range(400)]
        busy, beside = torch.empty(1 << 28, device="cuda", dtype=torch.uint8), torch.cuda.Stream()
        with torch.cuda.stream(beside):
            for _ in range(20):
                busy.add_(1)
        for out in outs:
            ring.linear(x, weight, None, (gain, 1e-5), gated, False, out)
        assert outs[0].isfinite().all()
        assert all(torch.equal(out, outs[0]) for out in outs)

    @pytest.mark.parametrize("number", [torch.nan, torch.inf])
    def test_a_row_of_bytes_hides_no_number_that_is_none(self, number: float) -> None:
        from quire.kernels.gemm.triton import code_ring_sm90 as ring

        weight, x, _, start = self.made("int4", 128, None, 64, 4096, 1)
        nothing = ring.linear(torch.zeros_like(x), weight, None, None, False, False, torch.empty_like(start))
        assert not nothing.any()
        x[0, 100] = number
        assert not ring.linear(x, weight, None, None, False, False, torch.empty_like(start)).isfinite().any()

    @pytest.mark.parametrize("rows", [9, 16, 17, 32, 33, 64, 100, 256, 300, 700])
    @pytest.mark.parametrize(("n", "k"), [(48, 128), (1008, 640), (272, 11008), (9008, 2176), (6144, 4096)])
    @pytest.mark.parametrize("gated", [False, True])
    def test_tiles_with_gates(self, gated: bool, n: int, k: int, rows: int) -> None:
        """Where they are not taken, too; parts of tiles, lines and columns that are no whole tiles and turns."""
        weight, x, bias, start = self.made("int4", 128, None, n, k, rows)
        self.check_tiles(weight, x, bias, start, gated=gated)

    @pytest.mark.parametrize(("rows", "n", "k"), [(100, 272, 1152), (1030, 4096, 2048), (4096, 6144, 1024)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("kind", "group", "zero"), [
        ("int4", 128, torch.uint8), ("int4", 32, torch.float32), ("e2m1", 32, None), ("nf4", 64, None),
        ("int8", 128, None), ("int8", 32, torch.float32), ("int8", 16, torch.int8), ("e4m3", 128, None),
        ("int4", 128, None),
    ])  # fmt: skip
    def test_tiles_with_gates_of_other_codes(
        self, kind: Kind, group: int, zero: torch.dtype | None, dtype: torch.dtype, rows: int, n: int, k: int
    ) -> None:
        weight, x, bias, start = self.made(kind, group, zero, n, k, rows, dtype)
        for gated in (False, True):
            self.check_tiles(weight, x, bias, start, gated=gated)

    @pytest.mark.parametrize("rows", [9, 64, 65, 200])
    @pytest.mark.parametrize("n", [1000, 32001])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_results_in_float32(self, dtype: torch.dtype, n: int, rows: int) -> None:
        """Of any number of lines, into a part of wider rows, beside which nothing is touched; twice, for counters."""
        from quire.kernels.gemm.triton.code_gemm_sm90 import takes

        k = 640
        weight, x, bias, _ = self.made("int8", k, None, n, k, rows, dtype, scale=torch.float32)
        exact = linear_reference(x, codes.widened(weight, torch.float32), bias)
        for _ in range(2):
            wide = torch.full((rows, n + 24), torch.nan, device="cuda")
            out = wide[:, 3 : n + 3]
            assert takes(x, weight, False, out, wide=True)
            assert grouped_linear.linear(x, weight, bias, out=out) is out
            assert_near(out, exact, dtype)
            assert wide[:, :3].isnan().all()
            assert wide[:, n + 3 :].isnan().all()
            found = grouped_linear.linear(x, weight, bias, out_dtype=torch.float32)
            assert torch.equal(found, out)
        assert not torch.equal(out, out.to(dtype).float())

    def check_tiles(
        self, weight: Codes, x: torch.Tensor, bias: torch.Tensor, start: torch.Tensor, *, gated: bool
    ) -> None:
        """Twice, since ring, workspace and counters are used again; with all tiles shared, none, and as planned."""
        from quire.kernels.gemm.triton import code_gemm_sm90 as tiles

        (rows, k), n = x.shape, start.shape[1] // (2 if gated else 1)
        wide, start = codes.widened(weight, torch.float32), start[:, :n].contiguous()
        plain, biased = (linear_reference(x, wide, y, gated=gated) for y in (None, bias))
        planned = tiles.plan(rows, n, k, gated=gated, plain=True, processors=132)
        for how in (planned, planned._replace(waves=0), planned._replace(waves=1000)):
            for _ in range(2):
                found = tiles.linear(x, weight, None, gated, False, torch.full_like(start, torch.nan), how)
                assert_near(found, plain, x.dtype)
                if gated:
                    found = tiles.linear(x, weight, bias, True, False, torch.full_like(start, torch.nan), how)
                    assert_near(found, biased, x.dtype)
                else:
                    found = tiles.linear(x, weight, bias, False, True, start.clone(), how)
                    assert_near(found, biased + start.float(), x.dtype)

    def made(
        self, kind: Kind, group: int, zero: torch.dtype | None, n: int, k: int, rows: int,
        dtype: torch.dtype = torch.bfloat16, scale: torch.dtype | None = None,
    ) -> tuple[Codes, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The weight, x [rows, k], a bias [n] and a residual [rows, n]."""
        torch.manual_seed(rows)
        found = codes.nearest(torch.randn(n, k, device="cuda") / 8, kind, group, scale or dtype, zero, False)
        numbers = codes.packed(found.codes).contiguous() if kind in codes.NIBBLES else found.codes
        shifted = None if found.zero is None or not found.zero.is_floating_point() else found.zero + 0.3
        weight = Codes(kind, group, numbers, found.scale, found.zero if shifted is None else shifted)
        x, start = (torch.randn(rows, size, device="cuda").to(dtype) for size in (k, n))
        return weight, x, torch.randn(n, device="cuda").to(dtype), start
