"""Products as summands: of all parts of K, each in its place."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.dispatch import device_on_cuda
from quire.kernels.gemm.in_parts import linear, parts_to_rotate, parts_to_sum
from quire.kernels.gemm.linear import linear_reference


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 8, 128), (200, 264, 640)])
def test_parts_lie_side_by_side(device: torch.device, m: int, n: int, k: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k + 16, generator=generator).to(device, torch.bfloat16)[:, :k]
    weight = torch.randn(n, k, generator=generator).to(device, torch.bfloat16) / k**0.5
    made = linear(x, weight, parts)
    assert (made.parts.shape, made.parts.is_contiguous(), made.experts, len(made)) == ((m, parts, n), True, None, m)
    for i, (of_x, of_weight) in enumerate(zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)):
        torch.testing.assert_close(made.parts[:, i].float(), linear_reference(of_x, of_weight), rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(made.sum().float(), linear_reference(x, weight), rtol=2**-6, atol=2e-2)


def test_only_where_it_pays(device: torch.device) -> None:
    def of(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
        x, weight = (torch.empty(lines, k, dtype=dtype, device=device) for lines in (m, n))
        return parts_to_sum(x, weight), parts_to_rotate(x, weight)

    if not device_on_cuda(device):
        assert of(256, 1536, 4096) == (1, 1)
        return
    assert [of(129, 4096, 3584)[0], of(256, 2048, 2048, torch.float16)[0]] == [2, 2]
    assert [of(128, 4096, 3584)[0], of(17, 2048, 2048, torch.float16)[0]] == [2, 4]
    for whole in (
        (16, 4096, 3584),
        (128, 8192, 7168),
        (257, 2048, 3584),
        (256, 8192, 7168),
        (256, 4096, 1024),
        (256, 4096, 3552),
    ):
        assert of(*whole)[0] == 1
    assert [of(256, 1536, 4096)[1], of(256, 3072, 4096)[1], of(256, 2560, 2048)[1]] == [4, 2, 2]
    assert [of(128, 1536, 4096)[1], of(17, 3072, 4096)[1]] == [5, 2]
    for whole in ((16, 1536, 4096), (128, 6144, 4096), (257, 1536, 4096), (256, 6144, 4096), (256, 1280, 1024)):
        assert of(*whole)[1] == 1
    assert of(256, 1536, 4096, torch.float32) == (1, 1)
