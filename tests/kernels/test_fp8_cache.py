"""Keys and values kept in 8 bits: kernels read and write them as plain arithmetic says."""

from __future__ import annotations

import pytest
import torch

from quire.attention.base import prefix_tile_rows
from quire.kernels.attention import paged as paged_attention
from quire.kernels.attention.rope import qk_norm_rope_write, qk_norm_rope_write_reference
from quire.kernels.attention.scores import PLAIN, Scores
from tests.kernels.compare import NARROW, assert_near
from tests.kernels.test_paged_attention import attend, make_cache, share

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SHAPES = [
    (4, 1, 32, 16, 0),  # small: it alone is interpreted by default
    (16, 8, 128, 16, 0),
    (8, 2, 128, 16, 100),
    (7, 1, 96, 16, 0),
    (4, 1, 256, 16, 0),
    (8, 1, 64, 8, 0),
]


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "window"), SHAPES)
def test_decode(
    device: torch.device, heads: int, kv_heads: int, dim: int, block_size: int, window: int, kv_dtype: torch.dtype
) -> None:
    seq_lens = [2900, 5, 500, 16, 1, 17, 64, 65, 63, 128, 200, 33]
    cache = make_cache(seq_lens, kv_heads, dim, block_size, NARROW, device, kv_dtype)
    q = torch.randn(len(seq_lens), heads, dim, device=device, dtype=NARROW)
    workspace = paged_attention.decode_workspace(len(seq_lens), heads, kv_heads, dim, device)
    lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
    schedule = paged_attention.decode_schedule(cache.seats, lens, heads, kv_heads, dim, kv_dtype, Scores(window))
    out = paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, dim**-0.5, workspace)
    rows = [attend(q[i : i + 1], *cache.tokens[i], dim**-0.5, window) for i in range(len(seq_lens))]
    assert_near(out, torch.cat(rows), NARROW)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 32), (16, 8, 128)])
def test_decode_with_shared_prefixes(device: torch.device, heads: int, kv_heads: int, dim: int) -> None:
    seq_lens = [321, 40, 33, 290, 289, 700, 35, 1, 300, 65, 700, 353]
    groups = [([0, 3, 8, 4], 288), ([10, 5], 672), ([2, 6, 1], 32)]
    cache = make_cache(seq_lens, kv_heads, dim, 16, NARROW, device, FP8[0])
    shared = share(cache, groups, 3 if heads == 16 else prefix_tile_rows(heads // kv_heads), 16)
    q = torch.randn(len(seq_lens), heads, dim, device=device, dtype=NARROW)
    workspace = paged_attention.decode_workspace(len(seq_lens), heads, kv_heads, dim, device)
    schedule = paged_attention.decode_schedule(
        cache.seats, torch.tensor(seq_lens, device=device, dtype=torch.int32), heads, kv_heads, dim, FP8[0], PLAIN,
        (shared.tokens_of_row, shared.members, shared.tiles),
    )  # fmt: skip
    out = paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, dim**-0.5, workspace)
    rows = [attend(q[i : i + 1], *cache.tokens[i], dim**-0.5, 0) for i in range(len(seq_lens))]
    assert_near(out, torch.cat(rows), NARROW)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "window"), SHAPES)
def test_prefill(
    device: torch.device, heads: int, kv_heads: int, dim: int, block_size: int, window: int, kv_dtype: torch.dtype
) -> None:
    queries, seq_lens = [1, 70, 33, 200], [40, 70, 500, 333]
    cache = make_cache(seq_lens, kv_heads, dim, block_size, NARROW, device, kv_dtype)
    q = torch.randn(sum(queries), heads, dim, device=device, dtype=NARROW)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    schedule = paged_attention.prefill_schedule(
        cache.seats, starts.to(device), torch.tensor(seq_lens, device=device, dtype=torch.int32), sum(queries),
        max(queries), heads, kv_heads, dim, block_size, kv_dtype, Scores(window),
    )  # fmt: skip
    out = paged_attention.prefill(q, cache.k, cache.v, cache.table, schedule, dim**-0.5)
    parts = zip(q.split(queries), cache.tokens, strict=True)
    rows = [attend(part, k, v, dim**-0.5, window) for part, (k, v) in parts]
    assert_near(out, torch.cat(rows), NARROW)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
@pytest.mark.parametrize("rotary", [64, 32])
def test_writes(device: torch.device, kv_dtype: torch.dtype, rotary: int) -> None:
    """Values too large for the type become its largest one; q is not narrowed."""
    if device.type == "cpu":
        pytest.skip("a cache on a CPU has the model's type, and Triton's interpreter rounds 8-bit floats otherwise")
    heads, kv_heads, dim, tokens, blocks = 4, 2, 64, 37, 6
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=NARROW)
    qkv[3, (heads + kv_heads) * dim :] = qkv[3, (heads + kv_heads) * dim :].sign() * 6e4
    angles = torch.randn(100, rotary // 2)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(0, 100, (tokens,), dtype=torch.int32)
    slots = torch.randperm(blocks * 16)[:tokens].int()
    slots[5] = -1
    arguments = [t.to(device) for t in (qkv, table, positions, slots)]
    caches = [[torch.zeros(blocks, kv_heads, 16, dim).to(kv_dtype).to(device) for _ in "kv"] for _ in range(2)]
    q = qk_norm_rope_write(*arguments, *caches[0], heads, kv_heads, dim)
    wanted = qk_norm_rope_write_reference(*arguments, *caches[1], heads, kv_heads, dim)
    assert q.dtype == NARROW
    assert_near(q.view(tokens, -1), wanted.double().view(tokens, -1), NARROW)
    largest = torch.finfo(kv_dtype).max
    assert caches[1][1].float().abs().max() == largest
    for got, expected in zip(*caches, strict=True):
        got, expected = got.float(), expected.float()
        torch.testing.assert_close(got, expected, rtol=0.13 if kv_dtype == FP8[0] else 0.26, atol=0.02)
        assert (got != expected).float().mean() < 0.01  # a rounding at the border, here and there
