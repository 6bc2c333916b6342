"""Kernels that start before their predecessor has ended must still see its results."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.attention import paged as paged_attention
from quire.kernels.attention import rope
from quire.kernels.gemm.linear import linear


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("sizes", [(512, 8, 2, 64, 1024), (1024, 16, 8, 128, 3072)], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 16, 24, 64, 100])
def test_a_captured_chain_gives_what_single_steps_give(rows: int, sizes: tuple[int, ...]) -> None:
    """Sixteen layers in one graph, replayed often, against the same calls with a wait after each: bit for bit."""
    torch.manual_seed(0)
    (hidden, heads, kv_heads, dim, inner), layers = sizes, 16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.05

    shapes = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]
    weights = [[random(*shape) for shape in shapes] for _ in range(layers)]
    gain, table = torch.ones(hidden, device="cuda", dtype=torch.bfloat16), torch.randn(1024, dim, device="cuda")
    caches = [[random(rows * 40 + 1, kv_heads, 16, dim) for _ in "kv"] for _ in range(layers)]
    seq_lens = torch.arange(rows, device="cuda", dtype=torch.int32) * 35 % 500 + 90
    blocks = torch.arange(rows * 40, device="cuda", dtype=torch.int32).view(rows, 40) + 1
    seats = torch.arange(rows, device="cuda", dtype=torch.int32)
    positions = seq_lens - 1
    slots = blocks[seats.long(), (seq_lens.long() - 1) // 16] * 16 + (seq_lens - 1) % 16
    workspace = paged_attention.decode_workspace(rows, heads, kv_heads, dim, torch.device("cuda"))
    start = random(rows, hidden)
    residual = torch.empty_like(start)

    def step(wait: bool) -> torch.Tensor:
        def done(y: torch.Tensor) -> torch.Tensor:
            if wait:
                torch.cuda.synchronize()
            return y

        residual.copy_(start)
        schedule = paged_attention.decode_schedule(seats, seq_lens, heads, kv_heads, dim, start.dtype)
        norm = (gain, 1e-6)
        for (qkv, o, gate_up, down), (k, v) in zip(weights, caches, strict=True):
            h = done(linear(residual, qkv, norm=norm))
            q = done(rope.qk_norm_rope_write(h, table, positions, slots, k, v, heads, kv_heads, dim))
            h = done(paged_attention.decode(q, k, v, blocks, schedule, 0.125, workspace))
            done(linear(h, o, residual=residual))
            h = done(linear(residual, gate_up, norm=norm, gated=True))
            done(linear(h, down, residual=residual))
        return done(linear(residual, weights[0][0], norm=norm, out_dtype=torch.float32))

    expected = step(wait=True).clone()
    assert bool(expected.isfinite().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(wait=False)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
