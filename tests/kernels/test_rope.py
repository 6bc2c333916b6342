from __future__ import annotations

import pytest
import torch

from quire.kernels.attention.rope import qk_norm_rope_write
from quire.kernels.summands import Summands
from tests.kernels.compare import assert_near

BLOCK_SIZE, NUM_BLOCKS, MAX_POSITION = 16, 24, 512


def cos_sin_table(rotary_dim: int, device: torch.device) -> torch.Tensor:
    angle = torch.arange(MAX_POSITION)[:, None] * 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angle.cos(), angle.sin()], dim=1).float().to(device)


def rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Complex multiplication of each pair (i, i + rotary_dim / 2), or (2i, 2i + 1): another way to say what the kernel
    does."""
    rotary_dim = table.shape[1]
    half = rotary_dim // 2
    turn = torch.complex(table[:, :half].double(), table[:, half:].double())[positions.long()][:, None]
    if interleaved:
        pairs = torch.view_as_complex(x[..., :rotary_dim].unflatten(-1, (half, 2)).contiguous()) * turn
        return torch.cat([torch.view_as_real(pairs).flatten(-2), x[..., rotary_dim:]], dim=-1)
    pairs = torch.complex(x[..., :half], x[..., half:rotary_dim]) * turn
    return torch.cat([pairs.real, pairs.imag, x[..., rotary_dim:]], dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", ["no", "first", "last"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "rotary_dim"),
    [
        (1, 16, 8, 128, 128),
        (9, 4, 1, 96, 96),
        (5, 6, 2, 64, 32),
        (140, 7, 1, 80, 80),
        (2, 2, 2, 256, 64),
        (3, 4, 2, 64, 2),
    ],
)
def test_rotates_norms_and_writes(
    device: torch.device, tokens: int, heads: int, kv_heads: int, dim: int, rotary_dim: int, normed: str,
    interleaved: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    table = cos_sin_table(rotary_dim, device)
    positions = torch.randint(0, MAX_POSITION, (tokens,), device=device, dtype=torch.int32)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=device)[:tokens].int()
    if tokens > 4:
        slots[tokens // 2] = -1  # padding: rotated as any other, but written nowhere
    weights = [torch.randn(dim, device=device, dtype=dtype) for _ in range(2)] if normed != "no" else [None, None]

    def norms(*parts: torch.Tensor) -> list[torch.Tensor]:
        return [
            x if w is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
            for x, w in zip(parts, weights, strict=True)
        ]

    # One allocation for both, as a pool would have it: the caches are strided views.
    pool = torch.full((NUM_BLOCKS, 2, kv_heads, BLOCK_SIZE, dim), 7.0, device=device, dtype=dtype)
    q_out = qk_norm_rope_write(
        qkv, table, positions, slots, pool[:, 0], pool[:, 1], heads, kv_heads, dim, *weights, 1e-6, interleaved,
        normed == "last",
    )  # fmt: skip

    q, k, v = qkv.double().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if normed != "last":
        q, k = norms(q, k)
    q, k = (rotate(x, positions, table, interleaved) for x in (q, k))
    if normed == "last":
        q, k = norms(q, k)
    written = pool.transpose(2, 3).reshape(NUM_BLOCKS, 2, BLOCK_SIZE, kv_heads, dim)
    real = slots >= 0
    block, offset = slots[real].long() // BLOCK_SIZE, slots[real].long() % BLOCK_SIZE
    assert_near(q_out, q, dtype)
    assert_near(written[block, 0, offset], k[real], dtype)
    assert torch.equal(written[block, 1, offset], v.to(dtype)[real])
    untouched = torch.ones(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool, device=device)
    untouched[block, offset] = False
    assert bool((written.transpose(1, 2)[untouched] == 7.0).all())


@pytest.mark.parametrize("parts", [2, 4])
def test_summands_are_added_up(device: torch.device, parts: int) -> None:
    """As the sum is rotated and written, but that this is rounded first."""
    heads, kv_heads, dim, tokens = 4, 2, 64, 19
    of_rows = torch.randint(-8, 9, (tokens, parts, (heads + 2 * kv_heads) * dim), device=device).to(torch.bfloat16)
    table, slots = cos_sin_table(32, device), torch.arange(tokens, device=device, dtype=torch.int32)
    weights = [torch.randn(dim, device=device, dtype=torch.bfloat16) for _ in range(2)]
    found = []
    for qkv in (Summands(of_rows), of_rows.sum(1)):  # of small integers: exact in either type
        pool = torch.zeros((NUM_BLOCKS, 2, kv_heads, BLOCK_SIZE, dim), device=device, dtype=torch.bfloat16)
        q = qk_norm_rope_write(qkv, table, slots, slots, pool[:, 0], pool[:, 1], heads, kv_heads, dim, *weights)
        found.append((q, pool))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
