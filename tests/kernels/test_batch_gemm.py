from __future__ import annotations

import pytest
import torch

from quire.kernels.dispatch import INTERPRETED, device_on_cuda, on_triton
from quire.kernels.gemm.triton.plan import Tiles
from tests.kernels.compare import NARROW, assert_near

pytest.importorskip("triton")
from quire.kernels.gemm.triton import batch_gemm

EPS = 1e-5
SMALL = [
    Tiles(64, 32, 64),
    Tiles(32, 64, 64, split=3, tall=True),
    Tiles(32, 64, 32, num_stages=3, tall=True),
    Tiles(64, 64, 64, split=2),
    Tiles(8, 64, 128, split=2, tall=True),
    Tiles(16, 64, 256, num_stages=2, tall=True),
]


@pytest.fixture(autouse=True)
def needs_triton(device: torch.device) -> None:
    if not on_triton(torch.empty(0, device=device)):
        pytest.skip("Triton runs on a GPU or in its interpreter")


def random(*shape: int, device: torch.device, dtype: torch.dtype = NARROW) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def expected_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64, one step after the other."""
    wide = x.double()
    if gain is not None:
        wide = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS) * gain.double()
    y = wide @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize("config", SMALL, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(17, 96, 200), (50, 100, 256), (120, 64, 96)])
def test_product(device: torch.device, m: int, n: int, k: int, config: Tiles) -> None:
    x, weight, bias = (random(*shape, device=device) for shape in ((m, k), (n, k), (n,)))
    plain = batch_gemm.linear(x, weight, None, None, EPS, False, None, None, config)
    assert plain.dtype == x.dtype
    assert_near(plain, expected_linear(x, weight), x.dtype)
    out = torch.empty(m, n, device=device)
    assert batch_gemm.linear(x, weight, bias, None, EPS, False, None, out, config) is out
    assert_near(out, expected_linear(x, weight, bias), torch.float32)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("config", SMALL, ids=str)
def test_gate(device: torch.device, config: Tiles, normed: bool, biased: bool) -> None:
    m, n, k = 33, 72, 160
    x, weight, bias = (random(*shape, device=device) for shape in ((m, k), (2 * n, k), (2 * n,)))
    weight *= k**-0.5  # gates of both signs that do not saturate
    gain = random(k, device=device) if normed else None
    y = batch_gemm.linear(x, weight, bias if biased else None, gain, EPS, True, None, None, config)
    assert y.shape == (m, n)
    assert_near(y, expected_linear(x, weight, bias if biased else None, gain, True), x.dtype)


@pytest.mark.parametrize("config", SMALL, ids=str)
def test_norm(device: torch.device, config: Tiles) -> None:
    """Rows of very different size, each normed by its own."""
    m, n, k = 40, 48, 200
    x = random(m, k, device=device) * torch.logspace(-2, 1, m, device=device)[:, None].to(NARROW)
    weight, gain = random(n, k, device=device), random(k, device=device)
    y = batch_gemm.linear(x, weight, None, gain, EPS, False, None, torch.empty(m, n, device=device), config)
    assert_near(y, expected_linear(x, weight, gain=gain), x.dtype)


@pytest.mark.parametrize("config", SMALL, ids=str)
def test_residual_is_summed_in_place_and_rounded_once(device: torch.device, config: Tiles) -> None:
    m, n, k = 70, 100, 136
    x, weight, residual = (random(*shape, device=device) for shape in ((m, k), (n, k), (m, n)))
    expected = expected_linear(x, weight, residual=residual)
    y = batch_gemm.linear(x, weight, None, None, EPS, False, residual, None, config)
    assert y is residual
    assert_near(y, expected, x.dtype)
    once = expected.to(x.dtype).double()
    assert (y.double() == once).double().mean() > 0.95  # the rest are ties that float32 sums break otherwise


def test_rows_may_lie_apart(device: torch.device) -> None:
    wide, weight = random(20, 512, device=device), random(64, 128, device=device)
    x = wide[:, 256:384]
    y = batch_gemm.linear(x, weight, None, None, EPS, False, None, None, SMALL[1])
    assert_near(y, expected_linear(x, weight), x.dtype)


def test_shares_are_summed_in_one_order(device: torch.device) -> None:
    """The same bits from every call, and none of one call's sums left for the next."""
    x, weight = random(64, 1024, device=device), random(128, 1024, device=device)
    config = Tiles(64, 64, 64, split=4)
    first = batch_gemm.linear(x, weight, None, None, EPS, False, None, None, config)
    for _ in range(2 if INTERPRETED else 50):
        batch_gemm.linear(-x, weight, None, None, EPS, False, None, None, config)
        assert torch.equal(batch_gemm.linear(x, weight, None, None, EPS, False, None, None, config), first)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [Tiles(64, 32, 128, prefetch=512), Tiles(64, 64, 64, split=4, prefetch=256)], ids=str
)
def test_a_captured_chain_gives_what_single_steps_give(device: torch.device, config: Tiles) -> None:
    """Products that start before their predecessor has ended must still see its results: bit for bit, often."""
    if not device_on_cuda(device):
        pytest.skip("needs a GPU's own kernels")
    hidden, inner, m = 1024, 3072, 50
    start, gain = random(m, hidden, device=device), random(hidden, device=device)
    layers = [
        (random(2 * inner, hidden, device=device) * 0.03, random(hidden, inner, device=device) * 0.02)
        for _ in range(12)
    ]
    residual = torch.empty_like(start)

    def step(wait: bool) -> None:
        residual.copy_(start)
        for gate_up, down in layers:
            h = batch_gemm.linear(residual, gate_up, None, gain, EPS, True, None, None, config)
            if wait:
                torch.cuda.synchronize()
            batch_gemm.linear(h, down, None, None, EPS, False, residual, None, config)
            if wait:
                torch.cuda.synchronize()

    step(wait=True)
    expected = residual.clone()
    assert bool(expected.isfinite().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(wait=False)
    for _ in range(50):
        residual.zero_()
        graph.replay()
        assert torch.equal(residual, expected)


def test_refuses_what_the_copy_engine_cannot_read(device: torch.device) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        batch_gemm.linear(
            random(20, 100, device=device), random(64, 100, device=device), None, None, EPS, False, None, None, SMALL[0]
        )
    with pytest.raises(ValueError, match="1 to 128 rows"):
        batch_gemm.linear(
            random(129, 64, device=device), random(64, 64, device=device), None, None, EPS, False, None, None, SMALL[0]
        )
