"""How far two ways to compute the same are apart: rounding is none, another factor is."""

from __future__ import annotations

import pytest
import torch

from quire.models.fallback.distance import distance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_rounded_otherwise_is_near(dtype: torch.dtype) -> None:
    """A large number that is rounded to its neighbour alone is further off than small ones are large."""
    exact = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact[1, 7] = 6.9
    one = exact.to(dtype)
    other = one.clone()
    other[1, 7] = (one[1, 7].float() * (1 + torch.finfo(dtype).eps)).to(dtype)
    assert other[1, 7] != one[1, 7]
    found = distance(other, one)
    assert found.largest == 0
    assert found.mean <= 2e-3


def test_another_factor_is_far() -> None:
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert distance((x.float() * 1.01).bfloat16(), x).mean > 8e-3
    assert distance(x.roll(1), x).largest > 1


def test_what_is_no_number_is_infinitely_far() -> None:
    x = torch.ones(2, 8)
    x[0, 3] = torch.nan
    assert distance(x, torch.ones(2, 8)).largest == float("inf")
    assert distance(torch.ones(2, 8), x).mean == float("inf")
