"""Weight formats: what a matrix multiplies as, in every format there is; and one that has no kernel at all."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.gemm.linear import linear_reference
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.quantization.base import ALL_ROWS, FLOATS, FORMATS, Matrix, Spec, Tensors, WeightFormat
from quire.quantization.fp8 import Fp8Channel
from quire.quantization.plain import Unquantized
from tests.kernels.compare import LIMITS

NAMES = list(FORMATS)
# Of a matrix, by what rounding to the format explains.
ERRORS = {
    "plain": 0.0, "fp8": 0.03, "fp8_block": 0.03, "int8": 0.01, "int8_rows": 0.01, "int4": 0.12, "mxfp4": 0.16,
    "nvfp4": 0.12, "nf4": 0.12,
}  # fmt: skip
ROUNDED = {"int8_rows": 0.02}  # of a product, where activations are rounded too


@pytest.fixture(params=[*NAMES, "halves"])
def weight_format(request: pytest.FixtureRequest) -> tuple[WeightFormat, float, float]:
    """With its errors, of a matrix and of a product."""
    if request.param == "halves":
        return Halves(), 0.2, 0.0
    return FORMATS.get(request.param)(), ERRORS[request.param], ROUNDED.get(request.param, 0.0)


class Halves(WeightFormat):
    """Multiples of one half, in int8: a format with nothing but what a format must have."""

    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Spec]:  # noqa: ARG002 (the same for all)
        return {"halves": Spec((rows, columns), torch.int8)}

    def pack(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"halves": (dense.float() * 2).round().clamp(-128, 127).to(torch.int8)}

    def matrix(self, tensors: Tensors, bias: torch.Tensor | None) -> Matrix:
        return HalvesMatrix(tensors["halves"], bias)


class HalvesMatrix(Matrix):
    def __init__(self, halves: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.halves, self.bias = halves, bias

    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return (self.halves[rows].float() / 2).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_what_is_packed_is_kept(weight_format: tuple[WeightFormat, float, float], dtype: torch.dtype) -> None:
    """With the shapes and types that the format says, and as near as it can be."""
    made, limit, _ = weight_format
    dense = torch.randn(24, 64).to(dtype) * torch.logspace(-1, 1, 24)[:, None].to(dtype)
    dense[5] = 0
    tensors = made.pack(dense)
    assert {name: Spec(tuple(t.shape), t.dtype) for name, t in tensors.items()} == made.tensors(24, 64, dtype)
    matrix = made.matrix(tensors, None)
    kept = matrix.dense(torch.float32)
    assert (kept - dense.float()).norm() <= limit * dense.float().norm()
    assert torch.equal(kept[5], torch.zeros(64))
    assert torch.equal(matrix.dense(torch.float32, slice(3, 7)), kept[3:7])


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 60])
def test_every_epilogue(weight_format: tuple[WeightFormat, float, float], rows: int, dtype: torch.dtype) -> None:
    made, _, rounded = weight_format
    n, k = 20, 64
    dense, x, bias = torch.randn(2 * n, k) * 2, torch.randn(rows, k).to(dtype), torch.randn(2 * n).to(dtype)
    norm = (torch.rand(k).to(dtype) + 0.5, 1e-5)
    both = made.matrix(made.pack(dense.to(dtype)), bias)
    matrix = made.matrix(made.pack(dense[:n].to(dtype)), bias[:n])
    wide, wide_both = matrix.dense(torch.float32), both.dense(torch.float32)
    start = torch.randn(rows, n).to(dtype)
    residual, out = start.clone(), torch.full((rows, n), torch.nan)
    for y, expected in (
        (matrix.linear(x), linear_reference(x, wide, bias[:n])),
        (matrix.linear(x, norm=norm), linear_reference(x, wide, bias[:n], norm=norm)),
        (both.linear(x, norm=norm, gated=True), linear_reference(x, wide_both, bias, norm=norm, gated=True)),
        (matrix.linear(x, residual=residual), linear_reference(x, wide, bias[:n], residual=start)),
        (matrix.linear(x, out_dtype=torch.float32), linear_reference(x, wide, bias[:n])),
        (matrix.linear(x, out=out), linear_reference(x, wide, bias[:n])),
        (matrix.linear(x, reader=both), linear_reference(x, wide, bias[:n])),
    ):
        assert isinstance(y, torch.Tensor)
        assert y.shape == expected.shape
        assert (y.float() - expected).norm() <= (3 * LIMITS[dtype] + rounded) * expected.norm()


def test_the_fp8_scale_brings_the_largest_to_448() -> None:
    dense = torch.randn(5000, 8).bfloat16()
    tensors = Fp8Channel().pack(dense)
    assert bool((tensors["weight"].float().abs().amax(1) == 448).all())
    wide = tensors["weight"].float() * tensors["weight_scale"][:, None]
    assert bool(((wide - dense.float()).abs() <= dense.float().abs().amax(1, keepdim=True) * 2**-4).all())


def test_fp8_holds_what_is_very_large_or_small() -> None:
    dense = torch.tensor([[3e38, -1e38, 0, 1e37], [1e-38, 0, -1e-38, 1e-40], [0.0, 0.0, 0.0, -0.0]])
    tensors = Fp8Channel().pack(dense)
    wide = Fp8Channel().matrix(tensors, None).dense(torch.float32)
    assert bool(wide.isfinite().all())
    assert torch.allclose(wide[0], dense[0], rtol=2**-4)
    assert bool((wide[1:].abs() <= 1e-30).all())


def test_a_layer_knows_its_shape_and_its_numbers() -> None:
    linear = Linear(8, 12, bias=True, parts={"a": 4, "b": 8}, role="rows")
    linear.allocate(Unquantized(), ("x.a", "x.b"))
    assert (linear.local_shape, linear.num_weights()) == ((12, 8), 12 * 9)
    assert [target.source for target in linear.targets()] == ["x.a.weight", "x.b.weight", "x.a.bias", "x.b.bias"]
    dense = torch.randn(12, 8)
    linear.set_dense(dense)
    linear.get_parameter("bias").zero_()
    x, norm = torch.randn(3, 8), RMSNorm(8, 1e-5)
    norm.weight.fill_(1)
    assert torch.allclose(linear.wide(x, norm), linear_reference(x, dense, norm=(norm.weight, 1e-5)), atol=1e-5)
