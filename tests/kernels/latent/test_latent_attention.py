"""Latent attention: what stands around it, and decode and prefill over a paged cache of latent rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from quire.kernels.attention import latent, latent_paged
from quire.kernels.attention.latent_rows import LatentRows
from quire.kernels.attention.rope import rotate
from quire.kernels.dispatch import device_on_triton
from tests.kernels.compare import NARROW, assert_near

DTYPES = sorted({NARROW, torch.float16}, key=str)
SHAPES = [  # heads, rank, rope, block size
    (3, 20, 8, 4),  # narrower than what the matrix units take
    (16, 512, 64, 16),
    (20, 256, 32, 16),
    (72, 32, 16, 8),  # several groups of lines
]


@dataclass
class Cache:
    """A pool of blocks in shuffled order; what no row owns is NaN, so that reading it shows."""

    rows: torch.Tensor
    seats: torch.Tensor
    table: torch.Tensor
    tokens: list[torch.Tensor]  # float64 [tokens, rank + rope] of each row


def make_cache(seq_lens: list[int], width: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Cache:
    counts = [-(-n // block_size) for n in seq_lens]
    pool = torch.full((2, sum(counts) + 2, 1, block_size, width), float("nan"), dtype=dtype)
    order = (torch.randperm(sum(counts) + 1) + 1).tolist()
    table = torch.full((len(seq_lens) + 5, max(counts) + 2), order[-1], dtype=torch.int32)  # stale: a NaN block
    seats = (torch.randperm(len(seq_lens) + 4)[: len(seq_lens)] + 1).int()
    tokens = []
    for seat, length, count in zip(seats.tolist(), seq_lens, counts, strict=True):
        blocks = [order.pop(0) for _ in range(count)]
        table[seat, :count] = torch.tensor(blocks)
        own = torch.randn(count * block_size, width).to(dtype)
        own[length:] = float("nan")
        pool[1, blocks, 0] = own.view(count, block_size, width)
        tokens.append(own[:length].double())
    return Cache(pool.to(device)[1], seats.to(device), table.to(device), tokens)


def cached_as(cache: Cache, rank: int) -> LatentRows:
    return LatentRows(rank, cache.rows.shape[3] - rank, cache.rows.shape[2], cache.rows.dtype)


def attend(q: torch.Tensor, rows: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """q [queries, heads, width], the last of the tokens → [queries, heads * rank], in float64."""
    lines = []
    for j, query in enumerate(q.double().cpu()):
        seen = rows[: len(rows) - len(q) + j + 1]
        lines.append((query @ seen.T * scale).softmax(-1) @ seen[:, :rank])
    return torch.stack(lines).flatten(1)


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rope", "block_size"), SHAPES)
def test_decode(device: torch.device, heads: int, rank: int, rope: int, block_size: int, dtype: torch.dtype) -> None:
    for seq_lens in ([1], [1500, 5, 300], [16, 1, 17, 15, 64, 65, 63, 128, 200, 31, 33, 32]):
        cache = make_cache(seq_lens, rank + rope, block_size, dtype, device)
        q = torch.randn(len(seq_lens), heads, rank + rope, device=device, dtype=dtype)
        workspace = latent_paged.decode_workspace(len(seq_lens), heads, rank, rope, device)
        schedule = latent_paged.decode_schedule(cache.seats, ints(seq_lens, device), heads, cached_as(cache, rank))
        out = latent_paged.decode(q, cache.rows, rank, cache.table, schedule, 0.2, workspace)
        rows = [attend(q[i : i + 1], cache.tokens[i], rank, 0.2) for i in range(len(seq_lens))]
        assert_near(out, torch.cat(rows), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rope", "block_size"), SHAPES)
@pytest.mark.parametrize("queries", [2, 5])
def test_decode_of_several_queries_a_row(
    device: torch.device, heads: int, rank: int, rope: int, block_size: int, queries: int, dtype: torch.dtype
) -> None:
    """Each sees one token more than the one before; behind a row's last they are padding and stay finite."""
    seq_lens = [900, 5, 129, 3, 66]
    counts = [min(1 + i % queries, n) for i, n in enumerate(seq_lens, 3)]
    cache = make_cache(seq_lens, rank + rope, block_size, dtype, device)
    q = torch.randn(len(seq_lens) * queries, heads, rank + rope, device=device, dtype=dtype)
    lens = ints(seq_lens, device)
    workspace = latent_paged.decode_workspace(1, heads, rank, rope, device, (len(seq_lens), queries))
    schedule = latent_paged.decode_schedule(
        cache.seats, lens, heads, cached_as(cache, rank), (queries, lens + 1 - ints(counts, device))
    )
    for _ in range(2):  # as layers do
        out = latent_paged.decode(q, cache.rows, rank, cache.table, schedule, 0.2, workspace)
        assert out.isfinite().all()
        for row, count in enumerate(counts):
            own = slice(row * queries, row * queries + count)
            assert_near(out[own], attend(q[own], cache.tokens[row], rank, 0.2), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rope", "block_size"), SHAPES)
def test_prefill(device: torch.device, heads: int, rank: int, rope: int, block_size: int, dtype: torch.dtype) -> None:
    batches = [[(1, 1)], [(70, 70)], [(1, 40), (5, 5), (33, 33), (17, 150), (1, 16), (16, 272)]]
    for rows in batches:  # (query tokens, tokens in all) a row
        queries, seq_lens = [q for q, _ in rows], [n for _, n in rows]
        cache = make_cache(seq_lens, rank + rope, block_size, dtype, device)
        q = torch.randn(sum(queries), heads, rank + rope, device=device, dtype=dtype)
        starts = [3 + sum(queries[:i]) for i in range(len(rows) + 1)]  # offsets need not begin at 0
        out = latent_paged.prefill(
            q, cache.rows, rank, cache.table, cache.seats, ints(starts, device), ints(seq_lens, device), max(queries),
            0.2,
        )  # fmt: skip
        parts = [attend(part, cache.tokens[i], rank, 0.2) for i, part in enumerate(q.split(queries))]
        assert_near(out, torch.cat(parts), dtype)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_rows(device: torch.device, shape: tuple[int, int, int, int], interleaved: bool) -> None:
    check_queries_and_rows(device, shape, interleaved, NARROW)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_rows_of_32_bits(device: torch.device, shape: tuple[int, int, int, int], interleaved: bool) -> None:
    """Which kernels of their own make."""
    check_queries_and_rows(device, shape, interleaved, torch.float32)


def check_queries_and_rows(
    device: torch.device, shape: tuple[int, int, int, int], interleaved: bool, dtype: torch.dtype
) -> None:
    """Queries through the keys' matrix, both rotations, the norm, and the rows in their slots."""
    heads, rank, rope, block_size = shape
    tokens, nope = 7, 12
    made = torch.randn(tokens, heads * (nope + rope) + 3, device=device, dtype=dtype)  # beside what else a product made
    q = made[:, 3:].view(tokens, heads, nope + rope)
    given = torch.randn(tokens, 5 + rank + rope, device=device, dtype=dtype)[:, 5:]  # beside what else a product made
    keys = torch.randn(heads, nope + 9, rank, device=device, dtype=dtype)[:, :nope]
    weight = torch.rand(rank, device=device, dtype=dtype) + 0.5
    cos_sin = torch.rand(50, rope, device=device)
    positions, slots = ints([0, 3, 49, 7, 1, 2, 9], device), ints([5, -1, 0, 11, 9, -1, 7], device)
    cache = torch.full((2, 4, 1, block_size, rank + rope), 3.0, device=device, dtype=dtype)[1]
    target = latent.LatentTarget(cos_sin, positions, slots, cache, interleaved)
    queries = latent.latent_queries(q, given, keys, (weight, 1e-6), target)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.float(), cos_sin, positions, interleaved=interleaved).cpu()

    through = torch.einsum("thn,hnr->thr", q[..., :nope].double(), keys.double()).cpu()
    assert_near(queries, torch.cat([through, turned(q[..., nope:])], 2), dtype)
    row = given[:, :rank].double()
    normed = row * (row.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    expected = torch.cat([normed.cpu(), turned(given[:, None, rank:])[:, 0]], 1)
    lines = cache.reshape(-1, rank + rope)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert_near(lines[slot], expected[token], dtype)
    unwritten = [slot for slot in range(len(lines)) if slot not in slots.tolist()]
    assert (lines[unwritten] == 3).all()


@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5, 17, 64, 65])
@pytest.mark.parametrize(("k", "n"), [(8, 10), (512, 128), (130, 72)])
def test_heads_have_matrices_of_their_own(
    device: torch.device, tokens: int, k: int, n: int, dtype: torch.dtype
) -> None:
    """Lines along either axis, and a place of one's own for the results."""
    x = torch.randn(tokens, 3, k + 3, device=device, dtype=dtype)[..., 3:]
    weight = torch.randn(3, n + 2, k, device=device, dtype=dtype)[:, 2:]
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double()).cpu()
    assert_near(latent.by_head(x, weight.transpose(1, 2)), expected, dtype)
    out = torch.full((tokens, 3, n + 1), 7.0, device=device, dtype=dtype)
    latent.by_head(x, weight.transpose(1, 2).contiguous(), out[..., 1:])
    assert_near(out[..., 1:], expected, dtype)
    assert (out[..., 0] == 7).all()
    assert latent.by_head(x[:0], weight.transpose(1, 2)).shape == (0, 3, n)


def test_rows_of_8_bits(device: torch.device) -> None:
    heads, rank, rope = 16, 32, 16
    cache = make_cache([200, 7], rank + rope, 16, torch.float16, device)
    narrow = cache.rows.nan_to_num(0).to(torch.float8_e4m3fn)
    q = torch.randn(2, heads, rank + rope, device=device, dtype=torch.float16)
    if not device_on_triton(device):
        pytest.skip("backends of torch's own widen what they gather")
    workspace = latent_paged.decode_workspace(2, heads, rank, rope, device)
    schedule = latent_paged.decode_schedule(
        cache.seats, ints([200, 7], device), heads, LatentRows(rank, rope, 16, narrow.dtype)
    )
    out = latent_paged.decode(q, narrow, rank, cache.table, schedule, 0.2, workspace)
    rows = [tokens.half().to(torch.float8_e4m3fn).double() for tokens in cache.tokens]
    assert_near(out, torch.cat([attend(q[i : i + 1], rows[i], rank, 0.2) for i in range(2)]), torch.float16)


def test_a_workspace_too_small_is_refused(device: torch.device) -> None:
    if not device_on_triton(device):
        pytest.skip("plain torch needs none")
    cache = make_cache([50, 20], 48, 16, NARROW, device)
    q = torch.randn(2, 4, 48, device=device, dtype=NARROW)
    schedule = latent_paged.decode_schedule(cache.seats, ints([50, 20], device), 4, cached_as(cache, 32))
    workspace = latent_paged.decode_workspace(1, 4, 32, 16, device)[:100]
    with pytest.raises(ValueError, match="2 rows needs"):
        latent_paged.decode(q, cache.rows, 32, cache.table, schedule, 0.2, workspace)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
def test_long_rows_among_short_ones_in_a_graph(heads: int) -> None:
    """Captured once, replayed with other lengths: nothing was read on the host."""
    device, seq_lens = torch.device("cuda"), [32768, 7, 5000, 64, 20000]
    torch.manual_seed(0)
    cache = make_cache(seq_lens, 576, 16, torch.bfloat16, device)
    lens = torch.ones(5, device=device, dtype=torch.int32)
    q = torch.randn(5, heads, 576, device=device, dtype=torch.bfloat16)
    workspace = latent_paged.decode_workspace(5, heads, 512, 64, device)

    def step() -> torch.Tensor:
        schedule = latent_paged.decode_schedule(cache.seats, lens, heads, cached_as(cache, 512))
        return latent_paged.decode(q, cache.rows, 512, cache.table, schedule, 0.05, workspace)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for shift in (0, 5):
        lens.copy_(torch.tensor(seq_lens) - shift)
        graph.replay()
        rows = [tokens[: len(tokens) - shift] for tokens in cache.tokens]
        expected = torch.cat([attend(q[i : i + 1], rows[i], 512, 0.05) for i in range(5)])
        assert_near(out, expected, torch.bfloat16)
