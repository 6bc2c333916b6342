"""Products with what is fused around them, on every way that `linear` may take, against float64."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.dispatch import INTERPRETED, on_cuda
from quire.kernels.gemm.cpu_linear import MAX_LEFT_ROWS
from quire.kernels.gemm.linear import linear, linear_reference
from tests.kernels.compare import LIMITS, assert_near

ROWS = [0, 1, 2, 3, 7, 8, 9, 16, 17, MAX_LEFT_ROWS, MAX_LEFT_ROWS + 1, 300]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def exact(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: tuple[torch.Tensor, float] | None
) -> torch.Tensor:
    wide = x.double()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm[1]) * norm[0].double()
    y = wide @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k", "biased", "normed"), [
    (72, 160, False, True), (72, 160, True, False), (37, 96, True, True), (130, 1504, False, False),
    (1024, 2048, False, True), (48, 100, False, True),
])  # fmt: skip
def test_every_epilogue(
    device: torch.device, rows: int, n: int, k: int, biased: bool, normed: bool, dtype: torch.dtype
) -> None:
    x, weight = random(device, dtype, rows, k), random(device, dtype, 2 * n, k) / k**0.5
    bias = random(device, dtype, 2 * n) if biased else None
    norm = (random(device, dtype, k) + 1.0, 1e-5) if normed else None
    half_bias = None if bias is None else bias[:n]
    expected = exact(x, weight[:n], half_bias, norm)

    y = linear(x, weight[:n], half_bias, norm=norm)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert y.shape == (rows, n)
    wide = linear(x, weight[:n], half_bias, norm=norm, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    out = torch.full((rows, n), torch.nan, device=device)
    assert linear(x, weight[:n], half_bias, norm=norm, out=out) is out
    assert torch.equal(out, wide)

    start = random(device, dtype, rows, n)
    residual = start.clone()
    assert linear(x, weight[:n], half_bias, norm=norm, residual=residual) is residual
    gate, up = exact(x, weight, bias, norm).chunk(2, dim=-1)
    both = linear(x, weight, bias, norm=norm, gated=True)
    assert both.dtype == dtype
    if rows:
        assert_near(y, expected, dtype)
        assert_near(wide, expected, dtype)
        assert_near(residual, start.double() + expected, dtype)
        exact_both = torch.nn.functional.silu(gate) * up
        error = (both.double() - exact_both).norm() / exact_both.norm()
        roundings = 3 if INTERPRETED else 2  # Triton's interpreter cuts bits off instead of rounding them
        assert error <= roundings * LIMITS[dtype], "norm, product and gate may each round"


def test_the_reference() -> None:
    x, weight, bias, gain = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8), torch.randn(16)
    residual = torch.randn(3, 4)
    gate, up = exact(x, weight, bias, (gain, 1e-5)).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up + residual.double()
    y = linear_reference(x, weight, bias, norm=(gain, 1e-5), gated=True, residual=residual)
    assert_near(y, expected, torch.float32)


def test_rows_may_be_apart(device: torch.device) -> None:
    x, weight = torch.randn(5, 256, device=device).bfloat16(), torch.randn(32, 128, device=device).bfloat16()
    assert_near(linear(x[:, :128], weight), exact(x[:, :128], weight, None, None), torch.bfloat16)


def test_a_large_row_keeps_its_norm(device: torch.device) -> None:
    """Residual streams have outliers: their squares must not overflow."""
    x, weight = torch.randn(2, 512, device=device).half(), torch.randn(32, 512, device=device).half()
    x[:, 7] = 30000.0
    norm = (torch.full((512,), 8.0, device=device).half(), 1e-5)
    assert_near(linear(x, weight, norm=norm), exact(x, weight, None, norm), torch.float16)


@pytest.mark.parametrize("wrong", [{"gated": True, "out_dtype": torch.float32}, {"gated": True, "residual": None}])
def test_what_excludes_one_another(wrong: dict[str, object]) -> None:
    x, weight = torch.randn(2, 16), torch.randn(8, 16)
    if "residual" in wrong:
        wrong = {**wrong, "residual": torch.zeros(2, 4)}
    with pytest.raises(ValueError, match="exclude"):
        linear(x, weight, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("outputs", [1001, 1008, 5])
def test_an_odd_number_of_outputs_into_lines_that_are_not(device: torch.device, outputs: int) -> None:
    """As logits lie: more rows than kernels of ours multiply, results in float32."""
    x, weight = torch.randn(200, 96, device=device).bfloat16(), torch.randn(outputs, 96, device=device).bfloat16()
    room = torch.full((200, 1024), 7.0, device=device)
    out = room[:, :outputs]
    assert linear(x, weight, out=out) is out
    right = x.double() @ weight.double().t()
    limit = 1e-5 if on_cuda(x) else LIMITS[torch.bfloat16]  # elsewhere products are rounded before they are widened
    assert torch.linalg.vector_norm(out.double() - right) <= limit * torch.linalg.vector_norm(right)
    assert bool((room[:, outputs:] == 7.0).all())
