"""Products as two summands: of both halves of K, each in its place."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.dispatch import device_on_cuda
from quire.kernels.gemm import halves
from quire.kernels.gemm.linear import linear_reference


@pytest.mark.parametrize(("m", "n", "k"), [(3, 8, 128), (200, 264, 640)])
def test_halves_lie_side_by_side(device: torch.device, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k + 16, generator=generator).to(device, torch.bfloat16)[:, :k]
    weight = torch.randn(n, k, generator=generator).to(device, torch.bfloat16) / k**0.5
    made = halves.linear(x, weight)
    assert (made.parts.shape, made.parts.is_contiguous(), made.experts, len(made)) == ((m, 2, n), True, None, m)
    for half in range(2):
        own = slice(half * k // 2, (half + 1) * k // 2)
        wanted = linear_reference(x[:, own], weight[:, own])
        torch.testing.assert_close(made.parts[:, half].float(), wanted, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(made.sum().float(), linear_reference(x, weight), rtol=2**-6, atol=2e-2)


def test_only_where_it_pays(device: torch.device) -> None:
    def pays(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return halves.pays(*(torch.empty(lines, k, dtype=dtype, device=device) for lines in (m, n)))

    if not device_on_cuda(device):
        assert not pays(256, 4096, 3584)
        return
    assert pays(129, 4096, 3584)
    assert pays(256, 2048, 2048, torch.float16)
    for no in ((128, 4096, 3584), (257, 2048, 3584), (256, 8192, 7168), (256, 4096, 1024), (256, 4096, 3552)):
        assert not pays(*no)
    assert not pays(256, 4096, 3584, torch.float32)
