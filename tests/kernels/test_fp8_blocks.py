"""Products of 8-bit floats with scales of 128 columns on both sides, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.gemm import fp8_blocks
from quire.kernels.gemm.codes import BLOCK, Codes
from tests.kernels.compare import LIMITS

E4M3 = torch.float8_e4m3fn
ROUNDING = 0.1 if INTERPRETED else 0.04  # which the interpreter does downwards
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(9, 96, 256), (16, 64, 1024), (33, 80, 384), (64, 144, 512), (130, 304, 640), (300, 128, 4096)]


def relative(y: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(y.double() - right) / torch.linalg.vector_norm(right))


def make(n: int, k: int, device: torch.device) -> Codes:
    scale = torch.rand(n, k // BLOCK, device=device) * 0.02 + 0.001
    return Codes("e4m3", BLOCK, torch.randn(n, k, device=device).to(E4M3), scale)


def wide(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """scale: of each line and block."""
    scaled: torch.Tensor = values.double().view(len(values), -1, BLOCK) * scale.double()[:, :, None]
    return scaled.flatten(1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 128, 16), (5, 384, 100), (3, 4096, 64), (2, 14336, 33)])
def test_what_the_library_gets(place: str, m: int, k: int, n: int, normed: bool) -> None:
    """The largest number of each block becomes the largest there is, and others the nearest; scales are turned."""
    if place == "cpu" and not INTERPRETED:
        pytest.skip("a kernel")
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    from quire.kernels.gemm.triton import fp8_blocks as kernels

    torch.manual_seed(0)
    device = torch.device(place)
    x = (torch.randn(m, k + 128, device=device) * torch.rand(m, 1, device=device)).half()[:, :k]
    gain, weight_scale = torch.rand(k, device=device) + 0.5, torch.rand(n, k // BLOCK, device=device)
    right = x.double()
    if normed:
        right = right * torch.rsqrt(right.square().mean(1, keepdim=True) + 1e-5) * gain
    values, scale, turned = kernels.prepared(x, (gain, 1e-5) if normed else None, 16, weight_scale)
    assert torch.equal(turned, weight_scale.t())
    assert scale.shape == (k // BLOCK, 16)
    largest = right.abs().unflatten(1, (-1, BLOCK)).amax(2)
    torch.testing.assert_close(scale.t()[:m].double(), largest / 448, rtol=1e-5, atol=0)
    assert relative(wide(values[:m], scale.t()[:m]), right) < ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from quire.kernels.gemm.triton import fp8_blocks as kernels

    torch.manual_seed(0)
    device = torch.device("cuda")
    x, weight = torch.randn(m, k, device=device).to(dtype), make(n, k, device)
    if not fp8_blocks.takes(x, weight):
        pytest.skip("no library that multiplies these")
    values, scale, _ = kernels.prepared(x, None, m, weight.scale)
    rows, dense = wide(values, scale.t()), wide(weight.codes, weight.scale)
    bias, old = torch.randn(n, device=device).to(dtype), torch.randn(m, n, device=device).to(dtype)
    options: dict[str, Any] = {"norm": None, "gated": False, "residual": None, "out_dtype": None, "out": None}
    right, limit = rows @ dense.t(), 2 * LIMITS[dtype]
    assert relative(fp8_blocks.linear(x, weight, bias, **options), right + bias.double()) < limit
    exact = fp8_blocks.linear(x, weight, None, **{**options, "out_dtype": torch.float32})
    assert relative(exact, right) < 1e-3
    summed = right + old.double()
    y = fp8_blocks.linear(x, weight, None, **{**options, "residual": old})
    assert y is old
    assert relative(y, summed) < limit
    pair = make(2 * n, k, device)
    gate, up = (rows @ wide(pair.codes, pair.scale).t()).chunk(2, 1)
    gated = fp8_blocks.linear(x, pair, None, **{**options, "gated": True})
    assert relative(gated, gate * torch.sigmoid(gate) * up) < 2 * limit
    assert relative(fp8_blocks.linear(x, weight, None, **options), x.double() @ dense.t()) < ROUNDING


@pytest.mark.gpu
def test_what_goes_elsewhere() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda")
    x, weight = torch.randn(16, 256, device=device).bfloat16(), make(64, 256, device)
    for other in (x[:8], x.float()):
        assert not fp8_blocks.takes(other, weight)
    for change in ({"group": 64}, {"outer": torch.ones(64, device=device)}, {"codes": weight.codes[:60]}):
        assert not fp8_blocks.takes(x, weight._replace(**change))
