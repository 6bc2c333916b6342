"""Attention on the CPU against float64 written out, over shuffled blocks, rows of all lengths and windows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attention import torch_cpu
from quire.attention.base import PLAIN, AttentionBackend, AttentionInputs, AttentionSpec, LayerCache, PerHead, Scores
from quire.attention.torch_cpu import TorchCPUAttention
from tests.attention.test_triton_backend import SCORES, per_head

HEAD_DIM = 16
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def attend(
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    block_size: int = 4,
    window: int | None = None,
    scores: Scores = PLAIN,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    head_dim: int = HEAD_DIM,
    make: type[AttentionBackend] = TorchCPUAttention,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """rows: (query tokens, tokens in all), one-query rows first. Returns ours and the exact result."""
    generator = torch.Generator().manual_seed(seed)
    scores = replace(scores, window=window) if window else scores
    sinks, slopes = of_heads = per_head(scores, heads=heads)
    max_blocks = max(-(-total // block_size) for _, total in rows)
    ids = list(range(1, len(rows) * max_blocks + 1))
    random.Random(seed).shuffle(ids)
    table = torch.zeros(len(rows) + 1, max_blocks, dtype=torch.int32)
    table[1:] = torch.tensor(ids).view(len(rows), max_blocks)
    shape = (len(ids) + 1, kv_heads, block_size, head_dim)
    cache = LayerCache(*(torch.full(shape, 1e4, dtype=dtype) for _ in "kv"))
    queries = [count for count, _ in rows]
    q = torch.randn(sum(queries), heads, head_dim, generator=generator).to(dtype)
    exact, start = [], 0
    for seat, (count, total) in enumerate(rows, start=1):
        k, v = (torch.randn(total, kv_heads, head_dim, generator=generator).to(dtype) for _ in "kv")
        for token in range(total):
            block = table[seat, token // block_size]
            cache.k[block, :, token % block_size], cache.v[block, :, token % block_size] = k[token], v[token]
        k, v = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        products = torch.einsum("qhd,khd->hqk", q[start : start + count].double(), k) * head_dim**-0.5
        position, token = torch.arange(total - count, total)[:, None], torch.arange(total)
        if scores.softcap:
            products = scores.softcap * torch.tanh(products / scores.softcap)
        if slopes is not None:
            products = products + slopes[:, None, None] * (token - position)
        hidden = token > position
        if scores.chunked:
            hidden = hidden | (token // scores.window != position // scores.window)
        elif scores.window:
            hidden = hidden | (token <= position - scores.window)
        raised = products.masked_fill(hidden, float("-inf")).exp()
        weights = raised / (
            raised.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
        )
        exact.append(torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1))
        start += count
    starts = [sum(queries[:i]) for i in range(len(rows) + 1)]
    lengths = [total for _, total in rows]
    decodes = next((i for i, count in enumerate(queries) if count > 1), len(rows))
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=dtype,
        device=torch.device(device),
        max_rows=len(rows),
        max_tokens=len(q),
        max_seq_len=max(lengths),
        scores=scores,
    )
    assert make.refuses(spec) is None
    backend = make(spec)
    seats = list(range(1, len(rows) + 1))
    plan = backend.plan(
        AttentionInputs(
            num_rows=len(rows),
            num_tokens=len(q),
            num_decodes=decodes,
            max_query_len=max(queries[decodes:], default=0),
            max_seq_len=max(lengths),
            seats=torch.tensor(seats, dtype=torch.int32, device=device),
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_table=table.to(device),
            seats_host=seats,
            query_start_host=starts,
            seq_lens_host=lengths,
        )
    )
    cache = LayerCache(cache.k.to(device), cache.v.to(device))
    of_heads = PerHead(*(None if own is None else own.to(device) for own in of_heads))
    return backend.run(q.to(device), cache, plan, head_dim**-0.5, of_heads).cpu(), torch.cat(exact)


def check(rows: list[tuple[int, int]], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    ours, exact = attend(rows, dtype=dtype, **options)
    assert ours.shape == exact.shape
    assert (ours.double() - exact).norm() / exact.norm() <= LIMITS[dtype]


STEPS = [
    [(1, 1)],
    [(1, 9), (1, 9)],
    [(1, 1), (1, 40), (1, 8), (1, 37), (1, 41)],
    [(13, 13)],
    [(5, 29), (30, 30), (2, 3)],
    [(1, 17), (1, 3), (6, 22), (4, 4)],
]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 9, 1000])
@pytest.mark.parametrize("rows", STEPS, ids=str)
def test_steps(rows: list[tuple[int, int]], window: int | None, dtype: torch.dtype) -> None:
    check(rows, dtype, window=window)


@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_what_scores_get_besides(scores: Scores) -> None:
    for rows in STEPS:
        check(rows, scores=scores)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    check([(1, 11), (1, 30), (7, 19)], heads=heads, kv_heads=kv_heads)


def test_more_than_the_scratch_memory_and_the_query_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_cpu, "SCRATCH_TOKENS", 64)
    monkeypatch.setattr(torch_cpu, "QUERY_CHUNK", 8)
    check([(1, 33), (1, 32), (1, 34), (1, 100), (37, 90), (20, 20)])
    check([(1, 33), (1, 32), (1, 34), (1, 100), (37, 90), (20, 20)], window=12)
    check([(1, 33), (1, 32), (1, 34), (1, 100), (37, 90), (20, 20)], scores=SCORES[-1])


_ROWS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6)


_WINDOWS = st.sampled_from([PLAIN, Scores(1), Scores(5), Scores(16), Scores(7, chunked=True), Scores(16, chunked=True)])


@given(_ROWS, _WINDOWS, st.sampled_from([1, 4, 16]))
@settings(max_examples=60, deadline=None)
def test_any_step(rows: list[tuple[int, int]], scores: Scores, block_size: int) -> None:
    ordered = sorted(((count, count + before) for count, before in rows), key=lambda row: row[0] > 1)
    check(ordered, scores=scores, block_size=block_size)


def test_rows_of_like_length_go_together() -> None:
    """8 decode rows of similar length must not become 8 calls a layer."""
    spec = AttentionSpec(4, 2, HEAD_DIM, 16, torch.float32, torch.float32, torch.device("cpu"), 8, 8, 2048)
    backend = TorchCPUAttention(spec)
    assert len(backend._alike([100, 110, 120, 90, 99, 101, 118, 105])) == 1
    assert len(backend._alike([16, 2000, 17, 1990])) == 2
    assert sorted(row for group in backend._alike([5, 900, 33, 2047]) for row in group) == [0, 1, 2, 3]
