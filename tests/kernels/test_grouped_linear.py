"""Products with weights in codes: kernels beside plain torch, for every kind of codes, scales and zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.gemm import codes, grouped_linear
from quire.kernels.gemm.codes import NIBBLES, Codes, Kind
from quire.kernels.gemm.linear import linear_reference
from quire.kernels.moe.routes import Rule
from quire.kernels.moe.routing import route
from quire.quantization.base import EachExpert
from quire.quantization.grouped import Grouped
from tests.kernels.compare import NARROW, assert_near

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU, no interpreter")
E4M3 = torch.float8_e4m3fn
# kind, columns that share a scale, its type, that of zeros, whether rows have factors
KINDS: dict[str, tuple[Kind, int, torch.dtype, torch.dtype | None, bool]] = {
    "int4": ("int4", 128, torch.float16, None, False),
    "int4-zeros": ("int4", 64, torch.float16, torch.uint8, False),
    "int4-fine": ("int4", 32, torch.float32, torch.uint8, False),
    "int4-offsets": ("int4", 32, torch.float32, torch.float32, False),
    "int4-whole": ("int4", 256, torch.float32, None, False),
    "int8": ("int8", 256, torch.float32, None, False),
    "int8-offsets": ("int8", 128, torch.float16, torch.float32, False),
    "int8-zeros": ("int8", 32, torch.float16, torch.int8, False),
    "e4m3": ("e4m3", 128, torch.float32, None, False),
    "mxfp4": ("e2m1", 32, torch.uint8, None, False),
    "nvfp4": ("e2m1", 16, E4M3, None, True),
    "nf4": ("nf4", 64, torch.float32, None, False),
    "fp4": ("fp4", 64, torch.float32, None, False),
}


def made(name: str, n: int = 40, k: int = 256) -> Codes:
    kind, group, scale, zero, outer = KINDS[name]
    group = k if group == 256 else group
    found = codes.nearest(torch.randn(n, k, device=DEVICE), kind, group, scale, zero, outer)
    numbers = codes.packed(found.codes) if kind in NIBBLES else found.codes
    zeros = found.zero
    if zeros is not None and zeros.is_floating_point():
        zeros = zeros + torch.rand_like(zeros)  # as of types with an offset: no integers
    return Codes(kind, group, numbers.contiguous(), found.scale, zeros, found.outer)


@pytest.mark.parametrize("columns", [2, 48, 96, 128, 130, 226, 256, 320, 384])
def test_what_is_packed_comes_back(columns: int) -> None:
    numbers = torch.randint(0, 16, (5, columns), dtype=torch.uint8)
    pairs = codes.packed(numbers)
    assert pairs.shape == (5, columns // 2)
    assert torch.equal(codes.unpacked(pairs), numbers)


@pytest.mark.parametrize("name", KINDS)
def test_rounding_is_to_the_nearest(name: str) -> None:
    """No other code of the same scale is nearer."""
    kind, group, scale, zero, outer = KINDS[name]
    dense = torch.randn(6, 256)
    found = codes.nearest(dense, kind, group, scale, zero, outer)
    numbers = codes.packed(found.codes) if kind in NIBBLES else found.codes
    of = Codes(kind, group, numbers, found.scale, found.zero, found.outer)
    error = (codes.widened(of, torch.float32) - dense).abs()
    if kind in NIBBLES:
        others = [
            (codes.widened(of._replace(codes=codes.packed(torch.full_like(found.codes, other))), torch.float32) - dense)
            for other in range(16)
        ]
        nearest = torch.stack([other.abs() for other in others]).amin(0)
        assert (error - nearest).max() <= 1e-5
    assert error.norm() / dense.norm() <= {"int4": 0.12, "e2m1": 0.16, "nf4": 0.1, "fp4": 0.15}.get(kind, 0.03)


@needs_kernels
@pytest.mark.parametrize("columns", [256, 192, 136, 232])
@pytest.mark.parametrize("name", KINDS)
def test_widening(name: str, columns: int) -> None:
    """With blocks that are not whole."""
    weight = made(name, k=columns)
    assert torch.equal(grouped_linear.widened(weight, torch.float32), codes.widened(weight, torch.float32))
    if weight.group == 32:  # and groups that cross blocks
        group, groups = 24, -(-columns // 24)
        wider = (
            None if y is None else y.repeat(1, groups)[:, :groups].contiguous() for y in (weight.scale, weight.zero)
        )
        odd = Codes(weight.kind, group, weight.codes, *wider)  # type: ignore[arg-type]
        assert torch.equal(grouped_linear.widened(odd, torch.float32), codes.widened(odd, torch.float32))
    wanted = torch.tensor([1, 0, 0, 1], dtype=torch.int32, device=DEVICE)
    some, every = grouped_linear.widened(weight, torch.float32, wanted), codes.widened(weight, torch.float32)
    assert torch.equal(some.view(4, 10, -1)[::3], every.view(4, 10, -1)[::3])


@needs_kernels
@pytest.mark.parametrize("rows", [1, 11])
@pytest.mark.parametrize("name", KINDS)
def test_few_rows(name: str, rows: int) -> None:
    from quire.kernels.gemm.triton import grouped_rows

    check_product(name, rows, grouped_rows.linear)


@needs_kernels
@pytest.mark.parametrize("name", KINDS)
def test_some_rows(name: str) -> None:
    from quire.kernels.gemm.triton import grouped_tiles

    check_product(name, 33, grouped_tiles.linear)


def check_product(name: str, rows: int, product: Callable[..., torch.Tensor]) -> None:
    weight = made(name, k=384 if "whole" not in name and KINDS[name][1] <= 128 else 256)
    x = torch.randn(rows, weight.columns, device=DEVICE).to(NARROW)
    bias, start = (torch.randn(shape, device=DEVICE).to(NARROW) for shape in ((40,), (rows, 40)))
    wide = codes.widened(weight, torch.float32)
    out = torch.full((rows, 40), torch.nan, dtype=torch.float32, device=DEVICE)
    assert_near(product(x, weight, bias, False, out), linear_reference(x, wide, bias), NARROW)
    residual = start.clone()
    product(x, weight, None, True, residual)
    assert_near(residual, linear_reference(x, wide, None, residual=start), NARROW)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 64, 200, 512, 700])
@pytest.mark.parametrize("name", KINDS)
def test_with_all_around_on_a_gpu(name: str, rows: int, dtype: torch.dtype) -> None:
    n, k = 1000, 1024
    weight = made(name, n, k)
    wide = codes.widened(weight, torch.float32)
    x, start = torch.randn(rows, k, device="cuda").to(dtype), torch.randn(rows, n, device="cuda").to(dtype)
    norm = (torch.rand(k, device="cuda").to(dtype) + 0.5, 1e-5)
    residual = start.clone()
    linear = grouped_linear.linear
    assert_near(linear(x, weight, norm=norm), linear_reference(x, wide, norm=norm), dtype)
    assert_near(linear(x, weight, residual=residual), linear_reference(x, wide, residual=start), dtype)
    gated = linear_reference(x, wide, norm=norm, gated=True)
    assert_near(linear(x, weight, norm=norm, gated=True), gated, dtype)
    assert_near(linear(x, weight, out_dtype=torch.float32), linear_reference(x, wide), dtype)


@pytest.mark.parametrize("name", ["int4", "mxfp4", "nvfp4"])
def test_experts_that_are_hit_are_widened(name: str) -> None:
    """On a GPU, or in the interpreter; elsewhere they come one by one."""
    kind, group, scale, zero, outer = KINDS[name]
    form = Grouped(kind, group, scale=scale, zero=zero, outer=outer)
    experts, hidden, inner = 5, 128, 64
    dense = [torch.randn(experts, *shape, device=DEVICE) / 8 for shape in ((2 * inner, hidden), (hidden, inner))]
    packed = [[form.pack(one) for one in every] for every in dense]
    gate_up, down = ({key: torch.stack([one[key] for one in every]) for key in every[0]} for every in packed)
    routes = route(torch.randn(4, experts, device=DEVICE), Rule(experts, 2))
    x = torch.randn(4, hidden, device=DEVICE).to(NARROW)
    start = torch.randn(4, hidden, device=DEVICE).to(NARROW)
    expected = EachExpert((form, gate_up), (form, down)).add(x, routes, start.clone())
    assert_near(form.experts(gate_up, down).add(x, routes, start.clone()), expected, NARROW)
