"""Products of 8-bit integers on both sides against float64, where the rounding of x is the same or known."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.gemm import int8_linear
from quire.kernels.gemm.int8_linear import Int8Weight
from quire.kernels.gemm.int8_plan import plan
from tests.kernels.compare import LIMITS, NARROW

ROUNDING = 0.01  # of x to 8 bits, where its norm is rounded before that or not
SHAPES = [(1, 64, 96), (5, 72, 272), (17, 40, 512), (70, 136, 304), (130, 64, 256)]


def make(n: int, k: int, rounding: str, device: torch.device) -> Int8Weight:
    values = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    scale = torch.rand(n, device=device) * 0.02
    fixed = None if rounding == "a row" else torch.full((1,), 0.0311, device=device)
    zero = torch.full((1,), 5.0, device=device) if rounding == "with a zero" else None
    return Int8Weight(values, scale, fixed, zero, None if zero is None else values.sum(1, dtype=torch.float32))


def expected(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    values, scale = int8_linear.rounded(x, weight)
    zero = 0.0 if weight.x_zero is None else weight.x_zero.double()
    y = ((values.double() - zero) * scale.double()) @ (weight.values.double() * weight.scale.double()[:, None]).t()
    return y if bias is None else y + bias.double()


def error(y: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(y.double() - right) / torch.linalg.vector_norm(right))


@pytest.mark.parametrize("rounding", ["a row", "fixed", "with a zero"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products(device: torch.device, m: int, n: int, k: int, rounding: str) -> None:
    weight, x = make(n, k, rounding, device), torch.randn(m, k, device=device).to(NARROW)
    bias, residual = (torch.randn(size, device=device).to(NARROW) for size in ((n,), (m, n)))
    right = expected(x, weight, bias)
    limit = 1.5 * LIMITS[NARROW]
    assert error(int8_linear.linear(x, weight, bias), right) < limit
    assert error(int8_linear.linear(x, weight, bias, out_dtype=torch.float32), right) < 1e-3
    sum_ = right + residual.double()
    y = int8_linear.linear(x, weight, bias, residual=residual)
    assert y is residual
    assert error(y, sum_) < limit
    gated = make(2 * n, k, rounding, device)
    gate, up = expected(x, gated, None).chunk(2, 1)
    assert error(int8_linear.linear(x, gated, gated=True), gate * torch.sigmoid(gate) * up) < 2 * limit


@pytest.mark.parametrize("rounding", ["a row", "fixed"])
def test_behind_a_norm(device: torch.device, rounding: str) -> None:
    weight, x = make(48, 320, rounding, device), torch.randn(9, 320, device=device).to(NARROW)
    gain = torch.rand(320, device=device) + 0.5
    wide = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    y = int8_linear.linear(x, weight, norm=(gain, 1e-5))
    assert error(y, expected(wide, weight, None)) < ROUNDING


def test_lines_that_the_kernels_do_not_take(device: torch.device) -> None:
    weight, x = make(24, 100, "a row", device), torch.randn(3, 100, device=device).to(NARROW)
    assert error(int8_linear.linear(x, weight), expected(x, weight, None)) < 1.5 * LIMITS[NARROW]


def test_a_row_of_zeros_and_no_rows(device: torch.device) -> None:
    weight = make(32, 64, "a row", device)
    assert not int8_linear.linear(torch.zeros(2, 64, device=device).to(NARROW), weight).any()
    assert int8_linear.linear(torch.zeros(0, 64, device=device).to(NARROW), weight).shape == (0, 32)


def test_every_plan_fits_a_processor() -> None:
    for m in (1, 16, 17, 64, 65, 128, 300, 8192):
        for n in (512, 4096, 28672):
            for gated in (False, True):
                how = plan(m, n, gated=gated, processors=132)
                stage = (how.block_m + how.block_n * (2 if gated else 1)) * how.block_k
                assert stage * how.stages <= 226 * 1024
