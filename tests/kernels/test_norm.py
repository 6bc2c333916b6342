from __future__ import annotations

import pytest
import torch

from quire.kernels.elementwise import norm
from tests.kernels.compare import assert_near

SHAPES = [(1025, 200), (1, 1024), (7, 4096), (3, 5, 128), (2, 2880), (33, 96), (0, 64), (1030, 1024)]


def expected_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape, device=device, dtype=dtype) * 3, torch.randn(shape[-1], device=device, dtype=dtype)
    y = norm.rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype
    if x.numel():
        assert_near(y, expected_norm(x, weight, 1e-5), dtype)


def test_eps_counts(device: torch.device) -> None:
    x = torch.full((2, 64), 1e-3, device=device)
    y = norm.rms_norm(x, torch.ones(64, device=device), 1e-2)
    assert_near(y, torch.full((2, 64), 1e-3 / (1e-6 + 1e-2) ** 0.5), torch.float32)


@pytest.mark.parametrize("rows", [5, 1029])
def test_rows_of_a_wider_tensor(device: torch.device, rows: int) -> None:
    x = torch.randn(rows, 200, device=device)[:, 16:144]
    weight = torch.randn(128, device=device)
    assert_near(norm.rms_norm(x, weight, 1e-6), expected_norm(x, weight, 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1024), (7, 4096), (33, 96), (0, 64)])
def test_added_to_the_residual(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape[0], shape[1] + 8, device=device) * 3).to(dtype)[:, :-8]
    residual, weight = torch.randn(shape, device=device, dtype=dtype), torch.randn(shape[1], device=device)
    expected = residual.double() + 0.5 * expected_norm(x, weight, 1e-5)
    y = norm.add_rms_norm(residual, x, weight, 1e-5, 0.5)
    assert y is residual
    if x.numel():
        assert_near(y, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("first", "second"), [(512, 128), (96, 96), (40, 200)])
def test_two_parts_of_a_row(device: torch.device, first: int, second: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, first + second + 64, device=device).to(dtype)
    weights = torch.randn(first, device=device), torch.randn(second, device=device)
    parts = x.split([first, second, 64], 1)
    expected = [expected_norm(part, weight, 1e-5) for part, weight in zip(parts, weights, strict=False)]
    y = norm.rms_norm_pair(x.clone(), weights, 1e-5)
    for part, wanted in zip(y.split([first, second, 64], 1), expected, strict=False):
        assert_near(part, wanted, dtype)
    assert torch.equal(y[:, -64:], x[:, -64:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1024), (7, 4544), (3, 5, 96), (0, 64)])
@pytest.mark.parametrize("given", ["nothing", "weight", "both"])
def test_layer_norm(device: torch.device, shape: tuple[int, ...], given: str, dtype: torch.dtype) -> None:
    x = (torch.randn(shape, device=device) * 3 + 1).to(dtype)
    weight, bias = (torch.randn(shape[-1], device=device, dtype=dtype) for _ in range(2))
    given_weight, given_bias = None if given == "nothing" else weight, bias if given == "both" else None
    y = norm.layer_norm(x, given_weight, given_bias, 1e-5)
    assert y.dtype == dtype
    if not x.numel():
        return
    wide = x.double() - x.double().mean(-1, keepdim=True)
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    if given_weight is not None:
        expected = expected * weight.double()
    if given_bias is not None:
        expected = expected + bias.double()
    assert_near(y, expected, dtype)
