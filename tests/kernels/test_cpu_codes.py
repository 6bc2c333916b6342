"""Products with integers of 4 and 8 bits by a CPU's own instructions, beside their widened numbers."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.gemm import codes
from quire.kernels.gemm.cpu_codes import MOST_ROWS, MOST_WIDE_ROWS, CpuProduct
from quire.quantization.grouped import Grouped, GroupedMatrix

HALF = torch.bfloat16
FORMS = {
    "int4": Grouped("int4", 64),
    "int4 with zeros": Grouped("int4", 32, scale=torch.float16, zero=torch.uint8),
    "int4 with zeros between": Grouped("int4", 128, scale=torch.float32, zero=torch.float32),
    "int8": Grouped("int8", 0, scale=torch.float32),
}


def made(name: str, n: int = 96, k: int = 256) -> GroupedMatrix:
    torch.manual_seed(0)
    form = FORMS[name]
    matrix = form.matrix(form.pack(torch.randn(n, k)), torch.randn(n, dtype=HALF))
    assert isinstance(matrix, GroupedMatrix)
    return matrix


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_the_widened_weight(name: str, rows: int) -> None:
    """Within what bfloat16 makes of one sum: scales, zeros and result have 8 bits."""
    matrix, x = made(name), torch.randn(rows, 256).to(HALF)
    assert CpuProduct(matrix.of).takes(x)
    assert matrix.bias is not None
    wanted = x.float() @ matrix.dense(torch.float32).T + matrix.bias.float()
    got = matrix.linear(x)
    assert isinstance(got, torch.Tensor)
    assert got.dtype == HALF
    error = (got.float() - wanted).abs().max() / wanted.abs().max()
    rounded = (x @ matrix.dense(HALF).T + matrix.bias).float()
    plain = (rounded - wanted).abs().max() / wanted.abs().max()
    assert error <= max(2 * plain, 2**-7)


@pytest.mark.parametrize("name", FORMS)
def test_results_in_float32(name: str) -> None:
    """As logits are wanted: not rounded once more."""
    matrix, x = made(name), torch.randn(3, 256).to(HALF)
    wanted = CpuProduct(matrix.of)(x, matrix.bias, torch.float32)
    assert wanted.dtype == torch.float32
    assert (wanted - matrix.linear(x).float()).abs().max() <= 2**-7 * wanted.abs().max()  # type: ignore[union-attr]
    wide = torch.full((3, 100), torch.nan)
    out = wide[:, 2:98]
    assert matrix.linear(x, out_dtype=torch.float32, out=out) is out
    assert torch.equal(out, wanted)
    assert torch.equal(matrix.linear(x, out_dtype=torch.float32), wanted)  # type: ignore[arg-type]


def test_few_rows_in_float32() -> None:
    matrix, x = made("int8"), torch.randn(MOST_WIDE_ROWS, 256)
    assert CpuProduct(matrix.of).takes(x)
    assert not CpuProduct(matrix.of).takes(torch.cat([x, x]))
    assert matrix.bias is not None
    wanted = x @ matrix.dense(torch.float32).T + matrix.bias.float()
    found = matrix.linear(x)
    assert isinstance(found, torch.Tensor)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_what_stands_around_a_product() -> None:
    matrix, x = made("int4"), torch.randn(3, 256).to(HALF)
    weight = torch.rand(256).to(HALF)
    y, residual = matrix.linear(x, norm=(weight, 1e-6)), torch.randn(3, 96).to(HALF)
    assert isinstance(y, torch.Tensor)
    before = residual.clone()
    added = matrix.linear(x, norm=(weight, 1e-6), residual=residual)
    assert added is residual
    assert torch.equal(residual, before.add_(y))
    gated = matrix.linear(x, norm=(weight, 1e-6), gated=True)
    assert isinstance(gated, torch.Tensor)
    assert (gated - torch.nn.functional.silu(y[:, :48]) * y[:, 48:]).abs().max() <= 2**-6 * y.abs().max() ** 2
    out = torch.empty(3, 96, dtype=HALF)
    assert matrix.linear(x, norm=(weight, 1e-6), out=out) is out
    assert torch.equal(out, y)


def test_what_torch_has_nothing_for_is_left_to_others() -> None:
    x = torch.randn(2, 256).to(HALF)
    assert not CpuProduct(made("int4").of).takes(x.float())
    assert not CpuProduct(made("int4").of).takes(torch.randn(MOST_ROWS + 1, 256).to(HALF))
    assert not CpuProduct(made("int4", n=40).of).takes(x)
    for kind, group in (("int8", 32), ("int4", 16), ("nf4", 64)):
        form = Grouped(kind, group)  # type: ignore[arg-type]
        matrix = form.matrix(form.pack(torch.randn(96, 256)), None)
        assert isinstance(matrix, GroupedMatrix)
        assert not CpuProduct(matrix.of).takes(x)
        wanted = x @ codes.widened(matrix.of, HALF).T
        got = matrix.linear(x)
        assert isinstance(got, torch.Tensor)
        assert (got - wanted).float().norm() <= 2**-7 * wanted.float().norm()
