"""Experts in codes, multiplied as they are: compiled anywhere; against float64 where there is a device for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.gemm import codes
from quire.kernels.moe import coded_experts
from quire.kernels.moe.inside import USUAL, Gate, Inside
from quire.kernels.triton.launch import has_gluon_sm90
from quire.quantization.grouped import CodedExperts, Grouped
from tests.kernels.compare import assert_near
from tests.kernels.gluon import TESTED, assert_assembles_well
from tests.kernels.test_moe_experts import exact, routes_of

E4M3 = torch.float8_e4m3fn
FORMATS = {
    "int4": Grouped("int4", 128),
    "int4-zeros": Grouped("int4", 32, zero=torch.uint8),
    "int4-offsets": Grouped("int4", 64, scale=torch.float32, zero=torch.float32),
    "mxfp4": Grouped("e2m1", 32, scale=torch.uint8),
    "nvfp4": Grouped("e2m1", 16, scale=E4M3, outer=True),
    "nf4": Grouped("nf4", 64, scale=torch.float32),
    "int8": Grouped("int8", 0, scale=torch.float32),
    "int8-fine": Grouped("int8", 32),
    "int8-zeros": Grouped("int8", 64, zero=torch.int8),
    "e4m3": Grouped("e4m3", 128, scale=torch.float32),
}
OSS = Gate(alpha=1.702, limit=1.5, shift=1.0)


class Made:
    """Experts of a format, as they are multiplied and in float32."""

    def __init__(self, name: str, experts: int, hidden: int, inner: int, dtype: torch.dtype, *, twice: bool = True):
        self.form, device = FORMATS[name], torch.device("cuda")
        shapes = ((2 * inner if twice else inner, hidden), (hidden, inner))
        self.tensors = []
        for n, k in shapes:
            dense = (torch.randn(experts, n, k, device=device) / k**0.5).to(dtype)
            packed = [self.form.pack(one) for one in dense]
            self.tensors.append({key: torch.stack([one[key] for one in packed]) for key in packed[0]})
        self.matrices = self.form.experts(self.tensors[0], self.tensors[1])
        self.gate_up, self.down = (
            torch.stack([
                codes.widened(self.form._codes({key: tensor[i] for key, tensor in one.items()}), torch.float32)
                for i in range(experts)
            ])
            for one in self.tensors
        )  # fmt: skip

    def is_taken(self, x: torch.Tensor, routes: Any) -> bool:
        assert isinstance(self.matrices, CodedExperts)
        return coded_experts.takes(x, routes, self.matrices._gate_up, self.matrices._down)


@TESTED
@pytest.mark.parametrize("more", [
    {"BIAS": True, "ALPHA": 1.702, "LIMIT": 7.0, "SHIFT": 1.0}, {"GATED": False, "NORM": False, "ADD": True},
    {"scale_ptr": "*i16"}, {"scale_ptr": "*i16", "GATED": False, "NORM": False, "ADD": True, "DEPTH": 3},
    {"GROUP": 16, "OUTER": True, "scale_ptr": "*fp8e4nv"},
    {"KIND": 0, "GROUP": 128, "K": 2048, "scale_ptr": "*bf16"}, {"KIND": 4, "GROUP": 64, "scale_ptr": "*fp32"},
    {"KIND": 0, "GROUP": 32, "ZERO": True, "scale_ptr": "*fp32", "zero_ptr": "*fp32"},
    {"KIND": 2, "GROUP": 128, "K": 2048, "scale_ptr": "*fp32", "words_ptr": "*fp8e4nv"},
    {"KIND": 1, "GROUP": 32, "scale_ptr": "*fp32", "words_ptr": "*i8", "SQUARED": True, "OUTPUTS": 16},
], ids=str)  # fmt: skip
def test_few_choices_assemble_well(more: dict[str, Any], tmp_path: Path) -> None:
    """Lines of 1,440 columns or of whole blocks; no number of the weight changes its thread."""
    from quire.kernels.moe.triton.code_direct import _code_direct_kernel

    types = {
        **dict.fromkeys(("x_ptr", "bias_ptr", "gain_ptr", "out_ptr"), "*bf16"), "words_ptr": "*i32", "scale_ptr": "*u8",
        "zero_ptr": "*u8", "experts_ptr": "*i32", "eps": "fp32",
        **dict.fromkeys(("outer_ptr", "table_ptr", "share_ptr"), "*fp32"),
        **dict.fromkeys(("x_stride", "stride", "groups", "out_stride"), "i32"),
    }  # fmt: skip
    constants = {
        "N": 768, "K": 1440, "TOP_K": 4, "OUTPUTS": 8, "DEPTH": 2, "KIND": 3, "GROUP": 32, "ZERO": False,
        "OUTER": False, "NORM": True, "GATED": True, "SQUARED": False, "BIAS": False, "ADD": False, "ALPHA": 1.0,
        "LIMIT": 0.0, "SHIFT": 0.0, "PDL": True,
    } | {name: value for name, value in more.items() if name.isupper()}  # fmt: skip
    types |= {name: value for name, value in more.items() if name in types}
    aligned = [name for name in types if name.endswith("_ptr") or name in ("x_stride", "out_stride")]
    code = assert_assembles_well(_code_direct_kernel, types, constants, aligned, tmp_path, 16)
    assert code.count("st.shared") <= 12  # of the warps' sums, and of x


@TESTED
@pytest.mark.parametrize("more", [
    {"rows": 16}, {"rows": 64}, {}, {"rows": 16, "GATED": False, "HALVES": 1}, {"GATED": False},
    {"TAIL": 2, "ALPHA": 1.702, "LIMIT": 7.0, "SHIFT": 1.0, "BIAS": True}, {"KIND": 2, "GROUP": 128},
    {"KIND": 1, "GROUP": 32, "ZERO": True, "rows": 32, "zero_ptr": "*i8"},
    {"KIND": 4, "GROUP": 64, "SQUARED": True, "TAIL": 1}, {"scale_ptr": "*i16"},
    {"rows": 32, "scale_ptr": "*i16", "programs": 2, "TAIL": 2},
    {"rows": 16, "scale_ptr": "*i16", "programs": 2, "TAIL": 2, "GATED": False, "HALVES": 1},
], ids=str)  # fmt: skip
def test_tiles_assemble_well(more: dict[str, Any], tmp_path: Path) -> None:
    """And the matrix units are waited for to the end once in a turn, of two consumers."""
    from triton.experimental.gluon import language as gl

    from quire.kernels.gemm.triton import code_gemm_sm90 as dense
    from quire.kernels.moe.triton import code_tiles_sm90 as tiles

    rows, swizzled = more.get("rows", 128), gl.NVMMASharedLayout(128, 16, 2)
    is_bytes = more.get("KIND", 3) in (1, 2)
    codes_of = f"i16[128, 32],{dense.BYTES_IN_SHARED!r}" if is_bytes else f"i32[128, 16],{dense.WORDS_IN_SHARED!r}"
    types = {
        "x_desc": f"tensordesc<bf16[{rows}, 64],{swizzled!r}>", "w_desc": f"tensordesc<{codes_of}>",
        "scale_ptr": "*fp32" if more.get("KIND", 3) != 3 else "*u8", "zero_ptr": "*u8", "bias_ptr": "*bf16",
        "out_ptr": "*bf16", **dict.fromkeys(("outer_ptr", "table_ptr", "share_ptr"), "*fp32"),
        **dict.fromkeys(("order_ptr", "tiles_ptr"), "*i32"),
        **dict.fromkeys(("N", "last", "most", "lines", "blocks", "groups"), "i32"),
    }  # fmt: skip
    programs = more.get("programs", 1)
    consumer, producer, mean = tiles.REGISTERS[programs]
    constants = {
        "TAIL": 0, "KIND": 3, "GROUP": 32, "ZERO": False, "OUTER": False, "BIAS": False, "GATED": True,
        "SQUARED": False, "ALPHA": 1.0, "LIMIT": 0.0, "SHIFT": 0.0, "HALVES": 2, "TURN": dense.TURN, "PDL": True,
        "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer,
    } | {name: value for name, value in more.items() if name.isupper()}  # fmt: skip
    types |= {name: value for name, value in more.items() if name in types}
    constants["STAGES"] = tiles.stages(rows, constants["HALVES"], nibbles=not is_bytes, programs=programs)
    aligned = [name for name in types if name.endswith("_ptr") or name == "N"]
    code = assert_assembles_well(tiles._code_tiles_kernel, types, constants, aligned, tmp_path, 64, maxnreg=mean)
    waits = [line.split()[1] for line in code.splitlines() if "wgmma.wait_group.sync.aligned" in line]
    assert waits == 2 * [*2 * constants["HALVES"] * dense.TURN * ["1;"], "0;"]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no GPU")
class TestOnDevice:
    @pytest.fixture(autouse=True)
    def _of_one_height(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only what is launched is compiled."""
        if has_gluon_sm90(torch.device("cuda")):
            from quire.kernels.moe.triton import code_tiles_sm90

            monkeypatch.setattr(code_tiles_sm90, "compile_once", lambda *_: None)

    @pytest.mark.parametrize("tokens", [1, 3, 9, 70, 130, 700])
    @pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (576, 320), (416, 160)])
    @pytest.mark.parametrize("name", ["mxfp4", "int4", "e4m3"])
    def test_sums_of_experts(self, name: str, hidden: int, inner: int, tokens: int) -> None:
        """Lines of whole blocks, and those whose last block is not whole; few choices, which have no order, and tiles
        of every height."""
        self.check(name, hidden, inner, tokens, USUAL)

    @pytest.mark.parametrize("tokens", [3, 9, 700])
    @pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("mxfp4", "int4", "e4m3")])
    def test_other_codes(self, name: str, tokens: int) -> None:
        self.check(name, 576, 320, tokens, USUAL)

    @pytest.mark.parametrize("tokens", [1, 3, 40, 300])
    @pytest.mark.parametrize("name", ["mxfp4", "int4", "e4m3"])
    def test_biases_and_another_gate(self, name: str, tokens: int) -> None:
        self.check(name, 576, 320, tokens, Inside(OSS), biased=True)
        self.check(name, 256, 192, tokens, Inside(Gate(squared=True)))

    @pytest.mark.parametrize("tokens", [1, 3, 40, 300])
    @pytest.mark.parametrize("name", ["mxfp4", "int4-zeros", "nf4", "e4m3", "int8"])
    def test_half_floats(self, name: str, tokens: int) -> None:
        self.check(name, 256, 192, tokens, USUAL, dtype=torch.float16)

    @pytest.mark.parametrize("name", ["mxfp4", "int4", "e4m3"])
    def test_a_norm_before(self, name: str) -> None:
        self.check(name, 576, 320, 2, Inside(OSS), biased=True, normed=True)

    @pytest.mark.parametrize("tokens", [1, 64, 1500])
    @pytest.mark.parametrize(
        ("name", "hidden", "inner"), [("mxfp4", 2880, 2880), ("int4", 2048, 768), ("e4m3", 2048, 768)]
    )
    def test_real_sizes_are_taken(self, name: str, hidden: int, inner: int, tokens: int) -> None:
        assert self.check(name, hidden, inner, tokens, USUAL, experts=8)

    def check(
        self, name: str, hidden: int, inner: int, tokens: int, inside: Inside, *, biased: bool = False,
        normed: bool = False, dtype: torch.dtype = torch.bfloat16, experts: int = 32,
    ) -> bool:  # fmt: skip
        """Twice, since rings are used again, and without a residual. Returns whether codes are not widened."""
        torch.manual_seed(tokens)
        top_k, device = experts // 8 + 1, torch.device("cuda")
        made = Made(name, experts, hidden, inner, dtype, twice=not inside.gate.squared)
        if biased:
            first, second = (torch.randn(experts, n, device=device).to(dtype) for n in (2 * inner, hidden))
            inside = Inside(inside.gate, first, second)
        x, start = (torch.randn(tokens, hidden, device=device).to(dtype) for _ in "xr")
        routes, seen = routes_of(experts, tokens, top_k, device, dead=tokens // 5), x.double()
        norm: tuple[torch.Tensor, float] | None = None
        if normed:
            gain = torch.rand(hidden, device=device).to(dtype)
            norm, seen = (gain, 1e-5), seen * torch.rsqrt(seen.square().mean(-1, keepdim=True) + 1e-5) * gain.double()
        some = torch.arange(0, tokens, max(tokens // 16, 1), device=device)
        picked = routes._replace(experts=routes.experts[some], weights=routes.weights[some])
        wanted = exact(seen[some], picked, made.gate_up, made.down, start[some], inside)
        for _ in range(2):
            found = made.matrices.add(x, routes, start.clone(), norm, inside)
            assert_near(found[some], wanted, dtype)
        alone = made.matrices.add(x, routes, None, norm, inside)
        assert_near(alone[some].double() + start[some].double(), wanted, dtype)
        return made.is_taken(x, routes)
