from __future__ import annotations

import pytest
import torch

from quire.kernels.elementwise.activation import gelu_tanh_and_mul, relu2, silu_and_mul, softcap_
from tests.kernels.compare import assert_near


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "size"), [(1, 3072), (5, 1000), (3, 24), (0, 8)])
def test_silu_and_mul(device: torch.device, tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(tokens, 2 * size, device=device, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, -1)
    y = silu_and_mul(gate_up)
    assert y.shape == (tokens, size)
    assert y.dtype == dtype
    if tokens:
        assert_near(y, gate / (1 + torch.exp(-gate)) * up, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "size"), [(1, 3072), (5, 1000), (3, 24), (0, 8)])
def test_gelu_tanh_and_mul(device: torch.device, tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(tokens, 2 * size, device=device, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, -1)
    y = gelu_tanh_and_mul(gate_up)
    assert y.shape == (tokens, size)
    assert y.dtype == dtype
    if tokens:
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        assert_near(y, gate / 2 * (1 + torch.tanh(inner)) * up, dtype)


@pytest.mark.parametrize(("rows", "columns"), [(1, 97), (3, 9000), (0, 8)])
def test_softcap(device: torch.device, rows: int, columns: int) -> None:
    memory = torch.randn(rows, columns + 3, device=device) * 40
    before, beside = memory.double(), memory[:, columns:].clone()
    y = softcap_(memory[:, :columns], 30.0, 0.5)
    assert y.data_ptr() == memory.data_ptr()
    assert torch.equal(memory[:, columns:], beside)
    if rows:
        assert_near(y, 30 * torch.tanh(before[:, :columns] * (0.5 / 30)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "size"), [(1, 3000), (3, 24), (0, 8)])
def test_squared_relu(device: torch.device, tokens: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, size + 8, device=device, dtype=dtype)[:, 8:]
    expected = x.double().clamp(min=0) ** 2
    y = relu2(x)
    assert y.is_contiguous()
    if tokens:
        assert_near(y, expected, dtype)
