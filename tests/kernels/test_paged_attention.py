from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from quire.attention.base import prefix_tile_rows
from quire.kernels.attention import paged as paged_attention
from quire.kernels.attention.scores import PerHead, Scores
from quire.kernels.dispatch import device_on_triton
from tests.kernels.compare import NARROW, assert_near


@dataclass
class Cache:
    """A pool of blocks in shuffled order; what no row owns is NaN, so that reading it shows."""

    k: torch.Tensor
    v: torch.Tensor
    seats: torch.Tensor
    table: torch.Tensor
    tokens: list[tuple[torch.Tensor, torch.Tensor]]  # float64 k, v [tokens, kv heads, dim] of each row


def make_cache(
    seq_lens: list[int],
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    seen_from: list[int] | None = None,
) -> Cache:
    """kv_dtype: of the cache, if it is another. seen_from: of each row, the first token that a window reaches to:
    blocks before it were given back."""
    counts = [-(-n // block_size) for n in seq_lens]
    num_blocks, max_blocks = sum(counts) + 3, max(counts) + 2
    pool = torch.full((num_blocks, 2, kv_heads, block_size, dim), float("nan"), dtype=dtype)
    order = (torch.randperm(num_blocks - 1) + 1).tolist()
    table = torch.full((len(seq_lens) + 5, max_blocks), order[-1], dtype=torch.int32)  # stale entries: a NaN block
    seats = (torch.randperm(len(seq_lens) + 4)[: len(seq_lens)] + 1).int()
    tokens = []
    for seat, length, count in zip(seats.tolist(), seq_lens, counts, strict=True):
        blocks = [order.pop(0) for _ in range(count)]
        table[seat, :count] = torch.tensor(blocks)
        if seen_from is not None:
            table[seat, : seen_from[len(tokens)] // block_size] = order[-1]
        kv = torch.randn(2, kv_heads, count * block_size, dim).to(kv_dtype or dtype).to(dtype)
        kv[:, :, length:] = float("nan")
        pool[blocks] = kv.view(2, kv_heads, count, block_size, dim).permute(2, 0, 1, 3, 4)
        tokens.append((kv[0, :, :length].double().transpose(0, 1), kv[1, :, :length].double().transpose(0, 1)))
    pool = pool.to(kv_dtype or dtype).to(device)
    return Cache(pool[:, 0], pool[:, 1], seats.to(device), table.to(device), tokens)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """One head group at a time, one query at a time, in float64: q [queries, heads, dim] → [queries, heads * dim]."""
    group = q.shape[1] // k.shape[1]
    lines = []
    for j, query in enumerate(q.double().cpu()):
        end = k.shape[0] - q.shape[0] + j + 1
        begin = max(end - window, 0) if window else 0
        keys = k[begin:end].repeat_interleave(group, 1)
        weights = (torch.einsum("hd,thd->ht", query, keys) * scale).softmax(-1)
        lines.append(torch.einsum("ht,thd->hd", weights, v[begin:end].repeat_interleave(group, 1)).flatten())
    return torch.stack(lines)


@dataclass
class Groups:
    """Rows with common first blocks, as `decode_schedule` takes them, and their share of a cache."""

    tokens_of_row: torch.Tensor
    members: torch.Tensor
    tiles: torch.Tensor


def share(cache: Cache, groups: list[tuple[list[int], int]], tile_rows: int, block_size: int) -> Groups:
    """Point each group's (rows, tokens) first blocks to those of its first row; blocks left over become NaN."""
    rows = len(cache.seats)
    tokens_of_row = torch.zeros(rows, dtype=torch.int32)
    members, tiles = [], []
    for group, tokens in groups:
        first, *others = group
        blocks = cache.table[cache.seats[first].item(), : tokens // block_size].clone()
        k, v = cache.tokens[first]
        for row in others:
            seat = cache.seats[row].item()
            unused = cache.table[seat, : tokens // block_size].long()
            cache.k[unused], cache.v[unused] = float("nan"), float("nan")
            cache.table[seat, : tokens // block_size] = blocks
            own_k, own_v = cache.tokens[row]
            cache.tokens[row] = torch.cat([k[:tokens], own_k[tokens:]]), torch.cat([v[:tokens], own_v[tokens:]])
        tokens_of_row[group] = tokens
        for begin in range(0, len(group), tile_rows):
            part = group[begin : begin + tile_rows]
            tiles.append([cache.seats[part[-1]].item(), len(members), len(part), tokens])
            members += part
    padded = torch.zeros(rows, dtype=torch.int32)
    padded[: len(members)] = torch.tensor(members)
    unused = [[0, 0, 0, 0]] * (max(rows // 2, len(tiles)) - len(tiles))
    device = cache.k.device
    return Groups(
        tokens_of_row.to(device), padded.to(device), torch.tensor(tiles + unused, dtype=torch.int32, device=device)
    )


SHAPES = [  # heads, kv heads, dim, block size, window
    (6, 2, 8, 16, 0),  # narrower than what the matrix units take
    (16, 8, 128, 16, 0),
    (8, 2, 128, 16, 100),
    (2, 2, 64, 16, 0),
    (7, 1, 96, 16, 0),
    (6, 2, 80, 32, 33),
    (4, 1, 256, 16, 0),
    (20, 1, 128, 8, 0),
]
MANY_HEADS = (71, 1, 64, 16, 0)  # more than a tile has for two rows


@pytest.mark.parametrize("dtype", sorted({NARROW, torch.float16, torch.float32}, key=str))
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "window"), [*SHAPES, MANY_HEADS])
def test_decode(
    device: torch.device, heads: int, kv_heads: int, dim: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    check_decode(device, heads, kv_heads, dim, block_size, window, dtype)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("many", [True, False])
def test_decode_cut_as_of_many_rows(
    device: torch.device, dim: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or as of some."""
    decode = pytest.importorskip("quire.kernels.attention.triton.decode")
    monkeypatch.setattr(decode, "FEW_ROWS", {})
    if many:
        monkeypatch.setattr(decode, "MANY_ROWS", dict.fromkeys(decode.MANY_ROWS, 0))
    check_decode(device, 6, 3, dim, 16, 0, NARROW)


def check_decode(
    device: torch.device, heads: int, kv_heads: int, dim: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    for seq_lens in ([1], [2900, 5, 500], [16, 1, 17, 15, 64, 65, 63, 128, 200, 31, 33, 32]):
        seen_from = [max(0, n - (window or n)) for n in seq_lens]
        cache = make_cache(seq_lens, kv_heads, dim, block_size, dtype, device, seen_from=seen_from)
        q = torch.randn(len(seq_lens), heads, dim, device=device, dtype=dtype)
        workspace = paged_attention.decode_workspace(len(seq_lens), heads, kv_heads, dim, device)
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        schedule = paged_attention.decode_schedule(cache.seats, lens, heads, kv_heads, dim, dtype, Scores(window))
        out = paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, dim**-0.5, workspace)
        rows = [attend(q[i : i + 1], *cache.tokens[i], dim**-0.5, window) for i in range(len(seq_lens))]
        assert_near(out, torch.cat(rows), dtype)


@pytest.mark.parametrize("dtype", sorted({NARROW, torch.float16, torch.float32}, key=str))
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "window"), SHAPES)
@pytest.mark.parametrize("queries", [5, 2])
def test_decode_of_several_queries_a_row(
    device: torch.device,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int,
    queries: int,
    dtype: torch.dtype,
) -> None:
    """Each sees one token more than the one before; behind a row's last they are padding and stay finite."""
    for seq_lens in ([3], [900, 5, 300], [16, 1, 17, 15, 64, 65, 63, 128, 200, 31, 33, 32, 129, 66, 130]):
        counts = [min(1 + i % queries, n) for i, n in enumerate(seq_lens, 3)]
        seen_from = [max(0, n + 1 - count - (window or n)) for n, count in zip(seq_lens, counts, strict=True)]
        cache = make_cache(seq_lens, kv_heads, dim, block_size, dtype, device, seen_from=seen_from)
        q = torch.randn(len(seq_lens) * queries, heads, dim, device=device, dtype=dtype)
        rows = len(seq_lens)
        workspace = paged_attention.decode_workspace(1, heads, kv_heads, dim, device, (rows, queries))
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        first = lens + 1 - torch.tensor(counts, device=device, dtype=torch.int32)
        schedule = paged_attention.decode_schedule(
            cache.seats, lens, heads, kv_heads, dim, dtype, Scores(window), drafted=(queries, first)
        )
        for _ in range(2):  # as layers do
            out = paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, dim**-0.5, workspace)
            assert out.isfinite().all()
            for row, count in enumerate(counts):
                own = slice(row * queries, row * queries + count)
                assert_near(out[own], attend(q[own], *cache.tokens[row], dim**-0.5, window), dtype)


@pytest.mark.parametrize("dtype", sorted({NARROW, torch.float16, torch.float32}, key=str))
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "window"), SHAPES)
def test_decode_with_shared_prefixes(
    device: torch.device, heads: int, kv_heads: int, dim: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    """What rows share is read from one of them; with a window, prefixes are passed over."""
    seq_lens = [321, 40, 33, 290, 289, 700, 35, 1, 300, 65, 700, 353]
    groups = [([0, 3, 8, 4], 288), ([10, 5], 672), ([2, 6, 1], 32)]
    cache = make_cache(seq_lens, kv_heads, dim, block_size, dtype, device)
    shared = share(cache, groups, 3 if heads == 16 else prefix_tile_rows(heads // kv_heads), block_size)
    q = torch.randn(len(seq_lens), heads, dim, device=device, dtype=dtype)
    workspace = paged_attention.decode_workspace(len(seq_lens), heads, kv_heads, dim, device)
    schedule = paged_attention.decode_schedule(
        cache.seats, torch.tensor(seq_lens, device=device, dtype=torch.int32), heads, kv_heads, dim, dtype,
        Scores(window), (shared.tokens_of_row, shared.members, shared.tiles),
    )  # fmt: skip
    rows = [attend(q[i : i + 1], *cache.tokens[i], dim**-0.5, window) for i in range(len(seq_lens))]
    for _ in range(2):  # as layers do
        out = paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, dim**-0.5, workspace)
        assert_near(out, torch.cat(rows), dtype)


@pytest.mark.parametrize("dtype", sorted({NARROW, torch.float16, torch.float32}, key=str))
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "window"), [*SHAPES, MANY_HEADS])
def test_prefill(
    device: torch.device, heads: int, kv_heads: int, dim: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    batches = [  # (query tokens, tokens in all) a row
        [(1, 1)],
        [(130, 130)],
        [(1, 40), (5, 5), (64, 64), (17, 150), (1, 16), (33, 64), (16, 272)],
    ]
    for rows in batches:
        queries, seq_lens = [q for q, _ in rows], [n for _, n in rows]
        seen_from = [max(0, n - q + 1 - (window or n)) for q, n in rows]
        cache = make_cache(seq_lens, kv_heads, dim, block_size, dtype, device, seen_from=seen_from)
        q = torch.randn(sum(queries), heads, dim, device=device, dtype=dtype)
        starts = [3 + sum(queries[:i]) for i in range(len(rows) + 1)]  # offsets need not begin at 0
        schedule = paged_attention.prefill_schedule(
            cache.seats, torch.tensor(starts, device=device, dtype=torch.int32),
            torch.tensor(seq_lens, device=device, dtype=torch.int32), len(q), max(queries), heads, kv_heads, dim,
            block_size, dtype, Scores(window),
        )  # fmt: skip
        out = paged_attention.prefill(q, cache.k, cache.v, cache.table, schedule, dim**-0.5)
        parts = [attend(part, *cache.tokens[i], dim**-0.5, window) for i, part in enumerate(q.split(queries))]
        assert_near(out, torch.cat(parts), dtype)


TERMS = [
    Scores(sinks=True),
    Scores(40, sinks=True),
    Scores(slopes=True),
    Scores(48, chunked=True),
    Scores(100, chunked=True, softcap=0.7, sinks=True, slopes=True),
]


def terms_of(scores: Scores, heads: int, device: torch.device) -> PerHead:
    """Sinks below and above what scores are; slopes as ALiBi has them."""
    sinks = torch.linspace(-2.0, 4.0, heads, device=device) if scores.sinks else None
    slopes = 2.0 ** -torch.arange(1, heads + 1, device=device).float() if scores.slopes else None
    return PerHead(sinks, slopes)


def attend_with(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, heads: PerHead) -> torch.Tensor:
    """As `attend`, with a scale of 0.2."""
    group, lines = q.shape[1] // k.shape[1], []
    sinks, slopes = (None if own is None else own.double().cpu()[:, None] for own in heads)
    for j, query in enumerate(q.double().cpu()):
        own = k.shape[0] - q.shape[0] + j
        token = torch.arange(own + 1)
        products = torch.einsum("hd,thd->ht", query, k[: own + 1].repeat_interleave(group, 1)) * 0.2
        if scores.softcap:
            products = scores.softcap * torch.tanh(products / scores.softcap)
        if slopes is not None:
            products = products + slopes * (token - own)
        if scores.chunked:
            products = products.masked_fill(token // scores.window != own // scores.window, -torch.inf)
        elif scores.window:
            products = products.masked_fill(token <= own - scores.window, -torch.inf)
        raised = products.exp()
        weights = raised / (raised.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()))
        lines.append(torch.einsum("ht,thd->hd", weights, v[: own + 1].repeat_interleave(group, 1)).flatten())
    return torch.stack(lines)


@pytest.mark.parametrize("dtype", sorted({NARROW, torch.float32}, key=str))
@pytest.mark.parametrize("scores", TERMS, ids=str)
def test_what_scores_get_besides_in_decode(device: torch.device, scores: Scores, dtype: torch.dtype) -> None:
    """Of rows of one share and of many; then with several queries a row, some of them padding."""
    heads, kv_heads, dim = 6, 2, 64
    seq_lens = [900, 5, 97, 1, 48, 49, 128, 96, 144]
    of_heads = terms_of(scores, heads, device)
    for queries in (1, 3):
        counts = [min(1 + i % queries, n) for i, n in enumerate(seq_lens)]
        firsts = [n + 1 - count for n, count in zip(seq_lens, counts, strict=True)]
        cache = make_cache(
            seq_lens, kv_heads, dim, 16, dtype, device, seen_from=[scores.first_seen(n - 1) for n in firsts]
        )
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        first_lens = torch.tensor(firsts, device=device, dtype=torch.int32)
        q = torch.randn(len(seq_lens) * queries, heads, dim, device=device, dtype=dtype)
        workspace = paged_attention.decode_workspace(len(seq_lens), heads, kv_heads, dim, device, (9, queries))
        schedule = paged_attention.decode_schedule(
            cache.seats, lens, heads, kv_heads, dim, dtype, scores,
            drafted=(queries, first_lens) if queries > 1 else None,
        )  # fmt: skip
        for _ in range(2):  # as layers do
            out = paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, 0.2, workspace, heads=of_heads)
            assert out.isfinite().all()
            for row, count in enumerate(counts):
                own = slice(row * queries, row * queries + count)
                assert_near(out[own], attend_with(q[own], *cache.tokens[row], scores, of_heads), dtype)


@pytest.mark.parametrize("dtype", sorted({NARROW, torch.float32}, key=str))
@pytest.mark.parametrize("scores", TERMS, ids=str)
def test_what_scores_get_besides_in_prefill(device: torch.device, scores: Scores, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = 6, 2, 64
    rows = [(1, 40), (5, 5), (64, 64), (17, 150), (1, 16), (33, 64), (16, 272), (130, 130)]
    queries, seq_lens = [q for q, _ in rows], [n for _, n in rows]
    cache = make_cache(
        seq_lens, kv_heads, dim, 16, dtype, device, seen_from=[scores.first_seen(n - q) for q, n in rows]
    )
    q, of_heads = torch.randn(sum(queries), heads, dim, device=device, dtype=dtype), terms_of(scores, heads, device)
    starts = torch.tensor([0, *queries]).cumsum(0).int().to(device)
    lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
    schedule = paged_attention.prefill_schedule(
        cache.seats, starts, lens, len(q), max(queries), heads, kv_heads, dim, 16, dtype, scores
    )
    out = paged_attention.prefill(q, cache.k, cache.v, cache.table, schedule, 0.2, heads=of_heads)
    parts = [attend_with(part, *cache.tokens[i], scores, of_heads) for i, part in enumerate(q.split(queries))]
    assert_near(out, torch.cat(parts), dtype)


@pytest.mark.parametrize("dtype", sorted({NARROW, torch.float32}, key=str))
def test_sinks_count_once_beside_shared_prefixes(device: torch.device, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, scores = 6, 2, 64, Scores(sinks=True)
    seq_lens = [321, 40, 33, 290, 289, 700]
    cache = make_cache(seq_lens, kv_heads, dim, 16, dtype, device)
    shared = share(cache, [([0, 3, 4], 288), ([2, 1], 32)], prefix_tile_rows(heads // kv_heads), 16)
    q, of_heads = torch.randn(6, heads, dim, device=device, dtype=dtype), terms_of(scores, heads, device)
    workspace = paged_attention.decode_workspace(6, heads, kv_heads, dim, device)
    schedule = paged_attention.decode_schedule(
        cache.seats, torch.tensor(seq_lens, device=device, dtype=torch.int32), heads, kv_heads, dim, dtype, scores,
        (shared.tokens_of_row, shared.members, shared.tiles),
    )  # fmt: skip
    out = paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, 0.2, workspace, heads=of_heads)
    rows = [attend_with(q[i : i + 1], *cache.tokens[i], scores, of_heads) for i in range(6)]
    assert_near(out, torch.cat(rows), dtype)


def test_many_rows_find_their_tiles(device: torch.device) -> None:
    """More rows than one look at query_start covers."""
    queries = torch.randint(1, 4, (300,)).tolist()
    seq_lens = [n + extra for n, extra in zip(queries, torch.randint(0, 20, (300,)).tolist(), strict=True)]
    cache = make_cache(seq_lens, 1, 64, 16, torch.float32, device)
    q = torch.randn(sum(queries), 1, 64, device=device)
    starts = torch.tensor([0, *queries]).cumsum(0).int().to(device)
    lens = torch.tensor(seq_lens, device=device).int()
    schedule = paged_attention.prefill_schedule(cache.seats, starts, lens, len(q), 3, 1, 1, 64, 16, q.dtype)
    out = paged_attention.prefill(q, cache.k, cache.v, cache.table, schedule, 0.1)
    parts = [attend(part, *cache.tokens[i], 0.1, 0) for i, part in enumerate(q.split(queries))]
    assert_near(out, torch.cat(parts), torch.float32)


@pytest.mark.parametrize("window", [0, 700])
def test_shares_cover_every_token_once_and_the_longest_stand_first(device: torch.device, window: int) -> None:
    if not device_on_triton(device):
        pytest.skip("plain torch goes row by row")
    from quire.kernels.attention.triton import decode
    from quire.kernels.triton.launch import num_processors, shared_bytes

    seq_lens = [1, 5000, 300, 33, 2000, 32, 64, 5000, 1]
    lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
    seats = torch.arange(len(seq_lens), device=device, dtype=torch.int32) + 7
    tile = decode.shape(128, 2, 2, len(lens) * 8 / num_processors(device), shared_bytes(device)).tokens
    schedule = paged_attention.decode_schedule(seats, lens, 16, 8, 128, torch.bfloat16, Scores(window))
    assert schedule.shares is not None
    items = schedule.shares.items.tolist()
    used = [item for item in items if item[0] >= 0]
    assert all(item[1:] == [0] * 7 for item in items[len(used) :])
    sizes = [end - begin for _, _, begin, end, *_ in used]
    whole = [-(-size // tile) for size, item in zip(sizes, used, strict=True) if item[4] == 0]  # first shares, in tiles
    assert whole == sorted(whole, reverse=True)
    seen = [min(n, window or n) for n in seq_lens]
    assert max(sizes) <= sum(seen) / (len(items) - len(seq_lens)) + 2 * tile
    for row, length in enumerate(seq_lens):
        shares = [item for item in used if item[0] == row]
        assert [item[4] for item in shares] == list(range(len(shares)))
        assert {(item[1], item[5], item[6]) for item in shares} == {(row + 7, len(shares), length - seen[row])}
        first, edges = shares[0][2], [edge for item in shares for edge in item[2:4]]
        assert edges[1:-1:2] == edges[2::2]
        assert edges[-1] == length
        assert first <= length - seen[row] < first + tile if window else first == 0
        assert all(begin < end for _, _, begin, end, *_ in shares)


def test_a_workspace_too_small_is_refused(device: torch.device) -> None:
    if not device_on_triton(device):
        pytest.skip("plain torch needs none")
    cache = make_cache([50, 20], 2, 64, 16, NARROW, device)
    lens = torch.tensor([50, 20], device=device, dtype=torch.int32)
    q = torch.randn(2, 4, 64, device=device, dtype=NARROW)
    schedule = paged_attention.decode_schedule(cache.seats, lens, 4, 2, 64, NARROW)
    workspace = paged_attention.decode_workspace(1, 4, 2, 64, device)[:100]
    with pytest.raises(ValueError, match="2 rows needs"):
        paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, 0.125, workspace)


def test_padding_rows_are_harmless(device: torch.device) -> None:
    """Seat 0, one token, null block: finite output, and the real rows are what they are alone."""
    cache = make_cache([50, 20], 2, 64, 16, NARROW, device)
    cache.k[0], cache.v[0], cache.table[0] = 1.0, 1.0, 0
    q = torch.randn(4, 4, 64, device=device, dtype=NARROW)
    seats = torch.cat([cache.seats, torch.zeros(2, device=device, dtype=torch.int32)])
    seq_lens = torch.tensor([50, 20, 1, 1], device=device, dtype=torch.int32)
    workspace = paged_attention.decode_workspace(4, 4, 2, 64, device)
    schedule = paged_attention.decode_schedule(seats, seq_lens, 4, 2, 64, NARROW)
    out = paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, 0.125, workspace)
    assert_near(out[:2], torch.cat([attend(q[i : i + 1], *cache.tokens[i], 0.125, 0) for i in range(2)]), q.dtype)
    assert torch.equal(out[2:].cpu(), torch.ones(2, 4 * 64, dtype=NARROW))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_long_rows_among_short_ones() -> None:
    device, seq_lens = torch.device("cuda"), [32768, 7, 5000, 1, 20000]
    torch.manual_seed(0)
    cache = make_cache(seq_lens, 2, 128, 16, torch.bfloat16, device)
    lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
    q = torch.randn(5, 8, 128, device=device, dtype=torch.bfloat16)
    workspace = paged_attention.decode_workspace(5, 8, 2, 128, device)
    schedule = paged_attention.decode_schedule(cache.seats, lens, 8, 2, 128, q.dtype)
    out = paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, 0.09, workspace)
    starts = torch.arange(6, device=device, dtype=torch.int32)
    whole = paged_attention.prefill_schedule(cache.seats, starts, lens, 5, 1, 8, 2, 128, 16, q.dtype)
    again = paged_attention.prefill(q, cache.k, cache.v, cache.table, whole, 0.09)
    expected = torch.cat([attend(q[i : i + 1], *cache.tokens[i], 0.09, 0) for i in range(5)])
    assert_near(out, expected, torch.bfloat16)
    assert_near(again, expected, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_decode_in_a_graph_follows_the_lengths() -> None:
    """Captured once, replayed with other lengths: nothing was read on the host."""
    device, seq_lens = torch.device("cuda"), [900, 350, 64]
    torch.manual_seed(0)
    cache = make_cache(seq_lens, 2, 128, 16, torch.bfloat16, device)
    lens = torch.ones(3, device=device, dtype=torch.int32)
    q = torch.randn(3, 8, 128, device=device, dtype=torch.bfloat16)
    workspace = paged_attention.decode_workspace(3, 8, 2, 128, device)

    def step() -> torch.Tensor:
        schedule = paged_attention.decode_schedule(cache.seats, lens, 8, 2, 128, q.dtype)
        return paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, 0.09, workspace)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for shift in (0, 13):
        lens.copy_(torch.tensor(seq_lens) - shift)
        graph.replay()
        tokens = [(k[: len(k) - shift], v[: len(v) - shift]) for k, v in cache.tokens]
        expected = torch.cat([attend(q[i : i + 1], *tokens[i], 0.09, 0) for i in range(3)])
        assert_near(out, expected, torch.bfloat16)
