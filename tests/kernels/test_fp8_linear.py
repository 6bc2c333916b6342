"""Products with a weight of 8-bit floats, on every way that they may take, against the widened weight in float64."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from quire.kernels.dispatch import INTERPRETED, device_on_triton, on_triton
from quire.kernels.elementwise.norm import rms_norm_reference
from quire.kernels.gemm import fp8_linear
from quire.kernels.gemm.fp8_linear import E4M3, Fp8Rows, linear, widened
from quire.kernels.gemm.linear import linear_reference
from quire.kernels.gemm.triton.plan import Plan, Registers, Ring, Shared, Tiles, Vector, plan_8_bits
from tests.kernels.compare import LIMITS, NARROW, assert_near
from tests.kernels.gluon import ON_DEVICE, TESTED, assert_assembles_well
from tests.kernels.test_gemm_plan import ODD, ROWS, check, products, shapes

pytest.importorskip("triton")
# Rounding both operands to 3 bits of mantissa, an error of 2^-4 at most and 2^-4 / sqrt(12) · 2 on the way, of each.
BOTH = 0.05
SPILLED = 128  # bytes a thread, of a long row before it is kept

Weight = tuple[torch.Tensor, torch.Tensor]


def random(device: torch.device, *shape: int, dtype: torch.dtype = NARROW) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def packed(device: torch.device, n: int, k: int) -> Weight:
    """Lines of very different size, and one of zeros."""
    dense = (
        torch.randn(n, k, device=device) / k**0.5 * torch.logspace(-2, 2, n, device=device)[torch.randperm(n)][:, None]
    )
    dense[n // 2] = 0
    scale = dense.abs().amax(1) / 448
    scale[n // 2] = 1
    return (dense / scale[:, None]).to(E4M3), scale


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def exact(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False, residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return linear_reference(
        x, widened(*weight, torch.float32), bias, norm=norm, gated=gated, residual=residual
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 70, 300])
@pytest.mark.parametrize(("n", "k", "biased"), [(48, 128, True), (37, 100, False)])
def test_every_epilogue(device: torch.device, rows: int, n: int, k: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight, gain = random(device, rows, k, dtype=dtype), packed(device, 2 * n, k), random(device, k, dtype=dtype)
    bias = random(device, 2 * n, dtype=dtype) if biased else None
    norm, half = (gain, 1e-5), (weight[0][:n], weight[1][:n])
    half_bias = None if bias is None else bias[:n]
    limit = BOTH if device.type == "cuda" and rows > 16 and dtype != torch.float32 else 3 * LIMITS[dtype]
    start = random(device, rows, n, dtype=dtype)
    residual, out = start.clone(), torch.full((rows, n), torch.nan, device=device)
    results = {
        "plain": (linear(x, *half, half_bias), exact(x, half, half_bias)),
        "normed": (linear(x, *half, half_bias, norm=norm), exact(x, half, half_bias, norm)),
        "gated": (linear(x, *weight, bias, norm=norm, gated=True), exact(x, weight, bias, norm, gated=True)),
        "wide": (linear(x, *half, half_bias, out_dtype=torch.float32), exact(x, half, half_bias)),
        "into": (linear(x, *half, half_bias, out=out), exact(x, half, half_bias)),
        "added": (linear(x, *half, half_bias, residual=residual), exact(x, half, half_bias, residual=start)),
    }
    assert results["into"][0] is out
    assert results["added"][0] is residual
    assert results["wide"][0].dtype == torch.float32  # type: ignore[union-attr]
    for name, (y, expected) in results.items():
        assert isinstance(y, torch.Tensor)
        assert y.shape == expected.shape
        assert y.dtype == (torch.float32 if name in ("wide", "into") else dtype)
        assert not rows or error(y, expected) <= (1.5 if name == "gated" else 1) * limit, name


def test_the_widened_weight_is_what_the_numbers_stand_for() -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(E4M3).view(2, 128)
    finite = weight.float().isfinite()
    scale = torch.tensor([0.5, 3.0])
    assert torch.equal(widened(weight, scale, torch.float32)[finite], (weight.float() * scale[:, None])[finite])
    assert int((~finite).sum()) == 2, "NaN of both signs, and no infinity"


# -- rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["as they are", "normed", "gated"])
@pytest.mark.parametrize("k", [64, 1000, 20000])
def test_rows_to_8_bits(device: torch.device, k: int, kind: str) -> None:
    if not on_triton(torch.empty(0, device=device)):
        pytest.skip("Triton runs on a GPU or in its interpreter")
    from quire.kernels.gemm.triton import fp8_rows

    x = random(device, 4, 2 * k if kind == "gated" else k) * torch.tensor([1, 30, 0, 1e-3], device=device)[:, None]
    x = x.to(NARROW)
    if kind == "normed":
        gain = random(device, k) + 1
        values, scale = fp8_rows.rms_norm_quantize(x, gain, 1e-5)
        expected = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5) * gain.double()
        normed, *both = fp8_rows.rms_norm_both(x, gain, 1e-5)
        assert torch.equal(both[0].float(), values.float())
        assert torch.equal(both[1], scale)
        assert error(normed, expected) <= LIMITS[NARROW]
    elif kind == "gated":
        values, scale = fp8_rows.silu_and_mul_quantize(x)
        gate, up = x.double().chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    else:
        values, scale = fp8_rows.quantize(x)
        expected = x.double()
    wide = values.double() * scale.double()[:, None]
    assert bool(wide.isfinite().all())
    assert torch.equal(wide[2], torch.zeros_like(wide[2]))
    largest = expected.abs().amax(1, keepdim=True)
    # Half a step of a number's own binade, or of the smallest one.
    step = torch.maximum(expected.abs() * 2**-4, largest / 448 * 2**-10)
    rest = [0, 1, 3]
    assert bool((values.float().abs().amax(1)[rest] >= (416 if INTERPRETED else 448)).all())
    near = (wide - expected).abs() <= step * 1.01
    # The interpreter loses what it carries over when it rounds.
    assert float(near[rest].double().mean()) >= (0.9 if INTERPRETED else 1)


@pytest.mark.parametrize("n", [64, 3000])
def test_scales_with_the_residual_sum(device: torch.device, n: int) -> None:
    if not on_triton(torch.empty(0, device=device)):
        pytest.skip("Triton runs on a GPU or in its interpreter")
    from quire.kernels.gemm.triton import fp8_rows

    y, residual = random(device, 5, n) * 1000, random(device, 5, n)
    row_scale, scale = random(device, 5, dtype=torch.float32), random(device, n, dtype=torch.float32)
    expected = residual.double() + y.double() * row_scale.double()[:, None] * scale.double()
    assert fp8_rows.add_scaled(y, row_scale, scale, residual) is residual
    assert error(residual, expected) <= LIMITS[NARROW]


# -- kernels ----------------------------------------------------------------------------------------------------

PLANS: list[Plan] = [
    Vector(2, 256, 2), Vector(4, 512, 2, apart=True), Shared(16, 64, 4, 4), Shared(16, 128, 2, 4),
    Registers(16, 128, 4, 4), Registers(16, 64, 2, 8), Tiles(16, 64, 128, tall=True),
    Tiles(32, 64, 64, split=2, tall=True), Tiles(32, 64, 128, tall=True),
    Tiles(64, 64, 64, split=3, tall=True), Tiles(8, 64, 128, 2, tall=True),
]  # fmt: skip


@pytest.mark.parametrize("how", PLANS, ids=str)
@pytest.mark.parametrize(("n", "k", "biased"), [(48, 1024, True), (37, 96, False), (72, 464, False)])
@pytest.mark.parametrize("m", [1, 5, 16, 40])
def test_kernels(device: torch.device, m: int, n: int, k: int, biased: bool, how: Plan) -> None:
    if not device_on_triton(device) or (device.type == "cpu" and isinstance(how, Registers)):
        pytest.skip("the kernels need a GPU, or an interpreter")
    if m > {Vector: 1, Shared: 16, Registers: 16}.get(type(how), 64):
        pytest.skip("so many rows are not its own")
    from quire.kernels.gemm.triton import decode_gemm as kernels
    from quire.kernels.gemm.triton import fp8_rows

    x, (weight, scale), gain = random(device, m, k), packed(device, 2 * n, k), random(device, k) + 1
    bias, norm = random(device, 2 * n) if biased else None, (gain, 1e-5)
    half = (weight[:n], scale[:n])
    half_bias = None if bias is None else bias[:n]
    limit = (3 if INTERPRETED else 2) * LIMITS[NARROW]

    def seen(normed: bool) -> tuple[torch.Tensor, tuple[torch.Tensor, float] | None]:
        """What the product gets to see, and the norm that is left to do."""
        if not isinstance(how, Tiles):
            return x, norm if normed else None
        values, row_scale = fp8_rows.rms_norm_quantize(x, *norm) if normed else fp8_rows.quantize(x)
        return values.float() * row_scale[:, None], None

    for normed in (False, True):
        out = torch.full((m, n), torch.nan, device=device)
        y = kernels.linear(x, half[0], half_bias, norm if normed else None, False, False, out, how, half[1])
        rows, left = seen(normed)
        assert error(y, exact(rows, half, half_bias, left)) <= limit
    start = random(device, m, n)
    y = kernels.linear(x, half[0], half_bias, None, False, True, start.clone(), how, half[1])
    assert error(y, exact(seen(False)[0], half, half_bias, residual=start)) <= limit
    out = torch.full((m, n), torch.nan, device=device, dtype=NARROW)
    y = kernels.linear(x, weight, bias, norm, True, False, out, how, scale)
    rows, left = seen(True)
    assert error(y, exact(rows, (weight, scale), bias, left, gated=True)) <= limit


# -- plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bulk", "ring"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("m", ROWS)
def test_every_plan_fits_the_hardware(m: int, bulk: bool, ring: bool) -> None:
    for n, k, gated, residual in shapes():
        how = plan_8_bits(m, n, k, gated=gated, residual=residual, bulk=bulk, ring=ring)
        if how is None:
            assert m > (64 if bulk else 16), "products of few rows never go through the library"
            continue
        check(how, m, n, k, gated, width=1)
        assert not isinstance(how, Tiles) or (bulk and m > 16), "few rows are multiplied as they are"
        assert not isinstance(how, Ring) or (ring and m <= 16)


@pytest.mark.parametrize("ring", [True, False])
def test_rows_of_one_graph_size_have_one_plan(ring: bool) -> None:
    for (n, k, gated, residual), (low, high) in product(shapes(), ((2, 8), (9, 16), (17, 32), (33, 64), (65, 128))):
        plans = {plan_8_bits(m, n, k, gated=gated, residual=residual, bulk=True, ring=ring) for m in (low, high)}
        assert len(plans) == 1


class TestCode:
    """What becomes of the kernels on compute capability 9.0."""

    pytestmark = TESTED

    @pytest.mark.parametrize(("outputs", "columns", "gated", "normed", "k"), [
        (16, 8, False, False, 4096), (32, 16, False, True, 3072), (32, 8, True, True, 1024),
    ])  # fmt: skip
    def test_of_few_rows(self, outputs: int, columns: int, gated: bool, normed: bool, k: int, tmp_path: Path) -> None:
        from quire.kernels.gemm.triton.skinny_registers import _register_kernel

        pointers = dict.fromkeys(("x_ptr", "bias_ptr", "gain_ptr", "out_ptr"), "*bf16")
        numbers = dict.fromkeys(("M", "N", "x_stride", "weight_stride", "out_stride"), "i32")
        assert_assembles_well(
            _register_kernel,
            {**pointers, **numbers, "weight_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "eps": "fp32"},
            {
                "K": k, "OUTPUTS": outputs, "COLUMNS": columns, "STEP": 128, "DEPTH": 2, "SCALED": True,
                "NORM": normed, "GATED": gated, "BIAS": False, "RESIDUAL": not normed, "EARLY": True, "PDL": True,
            },
            [*pointers, "weight_ptr", "scale_ptr", "N", "x_stride", "weight_stride", "out_stride"],
            tmp_path,
        )  # fmt: skip

    @pytest.mark.parametrize(("integers", "blocks"), [(False, False), (False, True), (True, False), (True, True)])
    @pytest.mark.parametrize(("rows", "split", "gated", "normed", "k"), [
        (1, 1, True, True, 4096), (1, 1, False, False, 14336), (8, 1, True, False, 4096), (16, 4, False, False, 14336),
    ])  # fmt: skip
    def test_of_the_ring(
        self,
        rows: int,
        split: int,
        gated: bool,
        normed: bool,
        k: int,
        integers: bool,
        blocks: bool,
        tmp_path: Path,
    ) -> None:
        """Registers leave room for others; what is read from shared memory comes by sixteen bytes."""
        from triton.experimental.gluon import language as gl

        from quire.kernels.gemm.triton.fp8_ring_sm90 import OPTIONS, _fp8_ring_kernel, registers

        how = plan_8_bits(rows, 4096, k, gated=gated, residual=not gated, bulk=True, ring=True)
        assert isinstance(how, Ring)
        assert how.split == split
        pointers = dict.fromkeys(("x_ptr", "bias_ptr", "gain_ptr", "out_ptr"), "*bf16")
        sums = {"scale_ptr": "*fp32", "partial_ptr": "*fp32"}
        numbers = dict.fromkeys(("M", "N", "x_stride", "out_stride", "blocks", "units"), "i32")
        code = assert_assembles_well(
            _fp8_ring_kernel,
            {
                **pointers, **sums, **numbers, "counter_ptr": "*i32", "eps": "fp32",
                "w_desc": f"tensordesc<i32[2, 8, 256],{gl.NVMMASharedLayout(128, 32, 3)!r}>",
            },
            {
                "K": k, "ROWS": rows, "STAGES": how.stages, "SPLIT": how.split, "INTEGERS": integers,
                "BLOCKS": blocks, "NORM": normed,                "GATED": gated,
                "BIAS": False, "RESIDUAL": not gated, "EARLY": how.early, "FLIGHT": how.flight, "PDL": True,
                "PRODUCER_REGISTERS": OPTIONS["PRODUCER_REGISTERS"],
            },
            [*pointers, *sums, "N", "x_stride", "out_stride"],
            tmp_path, SPILLED, num_warps=OPTIONS["num_warps"], maxnreg=registers(k, how),
        )  # fmt: skip
        assert "ld.shared.v4.b32" in code


# -- on a GPU ---------------------------------------------------------------------------------------------------


def what_rounds(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: tuple[torch.Tensor, float] | None,
    gated: bool,
) -> torch.Tensor:  # fmt: skip
    """What a result's error is a share of: the root of the squares that its sum is made of. The sum itself may be much
    smaller, and where few lines are larger than all others now and then is."""
    x = x.float() if norm is None else rms_norm_reference(x.float(), *norm)
    sums = (x.square() @ weight.square().T).sqrt()
    if not gated:
        return sums
    gate, up = linear_reference(x, weight, bias).chunk(2, dim=-1)
    of_gate, of_up = sums.chunk(2, dim=-1)
    return up.abs() * of_gate * 1.1 + torch.nn.functional.silu(gate).abs() * of_up  # 1.1: silu's steepest


class TestRing:
    pytestmark = ON_DEVICE

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("biased", [False, True])
    @pytest.mark.parametrize(("integers", "blocks"), [(False, False), (False, True), (True, False), (True, True)])
    @pytest.mark.parametrize("m", [1, 2, 8, 9, 16])
    @pytest.mark.parametrize("k", [64, 1040, 4096])
    def test_every_epilogue(
        self, k: int, m: int, integers: bool, blocks: bool, biased: bool, dtype: torch.dtype
    ) -> None:
        """Steps and units that are cut off, fewer and more of them than programs; shares of K; rows of any size.

        blocks: of 128 columns, with scales of their own.
        """
        from quire.kernels.gemm.triton import decode_gemm as kernels

        device, limit = torch.device("cuda"), 2 * LIMITS[dtype]
        plans = [Ring(4, 2), Ring(2, 2, split=2, early=True)] if m > 1 else [Ring(8, 3, early=True), Ring(4, 2, 2)]
        for how, n in product(plans, (8, 24, 5000)):
            x = (random(device, m, k, dtype=dtype) * torch.logspace(-2, 1, m, device=device)[:, None]).to(dtype)
            weight, scale = packed(device, 2 * n, k)
            if integers:
                weight, scale = (weight.float() / 448 * 128).round().clamp(-128, 127).to(torch.int8), scale * 448 / 128
            wide = weight.float() * scale[:, None]
            if blocks:
                scale = scale[:, None] * (torch.rand(2 * n, -(-k // 128), device=device) + 0.5)
                wide = weight.float() * scale.repeat_interleave(128, dim=1)[:, :k]
            bias = random(device, 2 * n, dtype=dtype) if biased else None
            norm = (random(device, k, dtype=dtype) * 0.1, 1e-5)  # in float16 too a gate times an up is finite
            half, half_bias = (weight[:n], scale[:n]), None if bias is None else bias[:n]
            start = random(device, m, n, dtype=dtype)
            for gated, gain, old in ((False, None, start), (False, norm, None), (True, norm, None)):
                if gated and how.split > 1:
                    continue
                mine, mine_bias = ((weight, scale), bias) if gated else (half, half_bias)
                own = wide if gated else wide[:n]
                expected = linear_reference(x, own, mine_bias, norm=gain, gated=gated, residual=old)
                rounded = what_rounds(x, own, mine_bias, gain, gated)
                seen = []
                for _ in range(2):
                    out = torch.full((m, n), torch.nan, device=device, dtype=dtype) if old is None else old.clone()
                    kernels.linear(x, mine[0], mine_bias, gain, gated, old is not None, out, how, mine[1])
                    seen.append(out)
                off = (seen[0].float() - expected).norm()
                assert off <= limit * (expected.norm() + rounded.norm())
                assert torch.equal(*seen), "not the same twice"

    @pytest.mark.parametrize(("integers", "blocks"), [(False, False), (False, True), (True, True)])
    @pytest.mark.parametrize(("m", "n", "k", "gated"), [
        (1, 4096, 14336, False), (1, 14336, 4096, True), (8, 14336, 4096, True), (16, 4096, 4096, False),
    ])  # fmt: skip
    def test_it_comes_out_alike(self, m: int, n: int, k: int, gated: bool, integers: bool, blocks: bool) -> None:
        """Bit for bit, however long memory takes: one behind the other, each let in before the last has ended, and
        beside a stream that keeps memory busy."""
        from quire.kernels.gemm.triton import decode_gemm as kernels

        device, lines = torch.device("cuda"), 2 * n if gated else n
        how = plan_8_bits(m, n, k, gated=gated, residual=not gated, bulk=True, ring=True)
        assert isinstance(how, Ring)
        weight, scale = packed(device, lines, k)
        if integers:
            weight = (weight.float() / 448 * 128).round().clamp(-128, 127).to(torch.int8)
        if blocks:
            scale = scale[:, None] * (torch.rand(lines, -(-k // 128), device=device) + 0.5)
        x = random(device, m, k)
        outs = [torch.full((m, n), torch.nan, device=device, dtype=x.dtype) for _ in range(400)]
        busy, beside = torch.empty(1 << 28, device=device, dtype=torch.uint8), torch.cuda.Stream()
        with torch.cuda.stream(beside):
            for _ in range(20):
                busy.add_(1)
        for out in outs:
            kernels.linear(x, weight, None, None, gated, False, out, how, scale)
        assert outs[0].isfinite().all()
        assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 16, 17, 32, 47, 64, 65, 100, 128, 129, 1000, 4096])
@pytest.mark.parametrize("shape", ODD)
def test_products_of_odd_shapes(shape: str, m: int, biased: bool) -> None:
    """K no multiple of 128 among them, nor of 16."""
    torch.manual_seed(m)
    device = torch.device("cuda")
    for n, k, gated, residual in products(*ODD[shape]):
        if m > 128 and n > 8192:
            continue  # the reference is slow
        lines = 2 * n if gated else n
        x, weight, gain = random(device, m, k), packed(device, lines, k), random(device, k) + 1
        bias = random(device, lines) if biased else None
        norm = None if residual else (gain, 1e-6)
        start = random(device, m, n) if residual else None
        expected = exact(x, weight, bias, norm, gated, start)
        y, again = (
            linear(x, *weight, bias, norm=norm, gated=gated, residual=None if start is None else start.clone())
            for _ in range(2)
        )
        assert isinstance(y, torch.Tensor)
        assert isinstance(again, torch.Tensor)
        if m <= 16 or (m > 64 and not fp8_linear.takes_rows(weight[0])):  # rows between are in 8 bits for any K
            assert_near(y, expected, torch.bfloat16)
        else:
            assert error(y, expected) <= (1.5 if gated else 1) * BOTH, "a gate multiplies two of them"
        assert torch.equal(again, y), "not the same twice"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("m", [1, 5, 16, 32, 64, 100, 256])
def test_a_captured_chain_gives_what_single_steps_give(m: int) -> None:
    """Products that start before their predecessor has ended must still see its results: bit for bit, often."""
    device = torch.device("cuda")
    hidden, inner = 1024, 3072
    start, gain = random(device, m, hidden), random(device, hidden) * 0.1 + 1
    layers = [(packed(device, 2 * inner, hidden), packed(device, hidden, inner)) for _ in range(12)]
    residual = torch.empty_like(start)

    def step(wait: bool) -> None:
        residual.copy_(start)
        for gate_up, down in layers:
            h = linear(residual, *gate_up, norm=(gain, 1e-6), gated=True, narrow=True)
            if wait:
                torch.cuda.synchronize()
            linear(h, *down, residual=residual)
            if wait:
                torch.cuda.synchronize()

    step(wait=True)
    expected = residual.clone()
    assert bool(expected.isfinite().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(wait=False)
    for _ in range(50):
        residual.zero_()
        graph.replay()
        assert torch.equal(residual, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("m", [65, 300, 2048])
def test_a_gate_for_the_next_product(m: int) -> None:
    device = torch.device("cuda")
    hidden, inner = 1024, 2816
    x, gate_up, down = random(device, m, hidden), packed(device, 2 * inner, hidden), packed(device, hidden, inner)
    gain, residual = random(device, hidden) + 1, random(device, m, hidden)
    rows = linear(x, *gate_up, norm=(gain, 1e-6), gated=True, narrow=True)
    assert isinstance(rows, Fp8Rows)
    y = linear(rows, *down, residual=residual.clone())
    assert isinstance(y, torch.Tensor)
    expected = exact(exact(x, gate_up, norm=(gain, 1e-6), gated=True), down, residual=residual)
    assert error(y, expected) <= 2 * BOTH


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("m", [1, 8, 16, 64, 200])
def test_large_activations_stay_finite(m: int) -> None:
    """Residual streams have outliers, and so has what the last product of a layer reads."""
    device = torch.device("cuda")
    x, weight = random(device, m, 2048, dtype=torch.bfloat16), packed(device, 256, 2048)
    x[:, 7] = 3e5
    y = linear(x, *weight)
    assert isinstance(y, torch.Tensor)
    assert error(y, exact(x, weight)) <= BOTH
