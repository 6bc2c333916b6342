from __future__ import annotations

import pytest
import torch

from quire.kernels.elementwise.activation import silu_and_mul
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
