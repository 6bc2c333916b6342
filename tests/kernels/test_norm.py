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
