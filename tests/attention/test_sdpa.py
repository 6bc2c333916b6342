"""Attention by torch's fused kernels against float64 written out, over shuffled blocks: any step, any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attention import sdpa
from quire.attention.base import PLAIN, AttentionInputs, LayerCache, Scores
from quire.attention.sdpa import SDPAttention
from quire.kernels.attention.paged import attention_reference
from tests.attention.test_torch_cpu import LIMITS, attend
from tests.attention.test_triton_backend import BLOCK_SIZE, DIM, HEADS, KV_HEADS, SCORES, per_head, spec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS: list[list[tuple[int, int]]] = [
    [(1, 1)],
    [(1, 9), (1, 9)],
    [(1, 1), (1, 40), (1, 8), (1, 37), (1, 41)],
    [(13, 13)],
    [(5, 29), (30, 30), (2, 3)],
    [(1, 17), (1, 3), (6, 22), (4, 4)],
    [(1, 900), (1, 3), (1, 700), (1, 5), (1, 300), (50, 600)],
]


def check(rows: list[tuple[int, int]], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    if options.get("device") == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    ours, exact = attend(rows, dtype=dtype, make=SDPAttention, **options)
    assert ours.shape == exact.shape
    assert (ours.double() - exact).norm() / exact.norm() <= LIMITS[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 9, 1000])
@pytest.mark.parametrize("rows", STEPS, ids=lambda rows: str(len(rows)))
def test_steps(rows: list[tuple[int, int]], window: int | None, dtype: torch.dtype, device: str) -> None:
    check(rows, dtype, window=window, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_what_scores_get_besides(scores: Scores, device: str) -> None:
    for rows in STEPS:
        check(rows, scores=scores, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 16), (4, 4, 64), (6, 2, 80), (8, 1, 128)])
def test_head_groups(heads: int, kv_heads: int, dim: int, device: str) -> None:
    check([(1, 11), (1, 30), (7, 19)], heads=heads, kv_heads=kv_heads, head_dim=dim, device=device)


def test_what_is_gathered_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    gathered = SDPAttention._gathered

    def noted(self: SDPAttention, cache: torch.Tensor, piece: Any) -> torch.Tensor:
        seen.append((piece.rows, piece.rows * piece.tokens))
        return gathered(self, cache, piece)

    monkeypatch.setattr(SDPAttention, "_gathered", noted)
    monkeypatch.setattr(sdpa, "GATHERED_BYTES", 128 * 2 * 16 * 4)  # 128 tokens
    monkeypatch.setattr(sdpa, "MASK_BYTES", 300)
    rows = [(1, 33), (1, 32), (1, 34), (1, 100), (1, 30), (37, 90), (20, 20)]
    check(rows)
    assert all(tokens <= 128 for _, tokens in seen)
    assert (3, 108) in seen, "rows of like length go together"
    check(rows, window=12)


_ROWS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6)


_WINDOWS = st.sampled_from([PLAIN, Scores(1), Scores(5), Scores(16), Scores(7, chunked=True), Scores(16, chunked=True)])


@given(_ROWS, _WINDOWS, st.sampled_from([1, 4, 16]))
@settings(max_examples=60, deadline=None)
def test_any_step(rows: list[tuple[int, int]], scores: Scores, block_size: int) -> None:
    ordered = sorted(((count, count + before) for count, before in rows), key=lambda row: row[0] > 1)
    check(ordered, scores=scores, block_size=block_size)


def drafted(device: str) -> AttentionInputs:
    """Rows of four queries, of which the last ones are padding where a row has fewer drafts."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return AttentionInputs(
        num_rows=5, num_tokens=20, num_decodes=5, max_query_len=0, max_seq_len=128,
        seats=ints([3, 1, 4, 2, 0]), query_start=ints([0]), seq_lens=ints([40, 19, 128, 4, 1]),
        block_table=torch.arange(5 * 8, dtype=torch.int32, device=device).view(-1, 8), num_queries=4,
        first_lens=ints([37, 18, 125, 4, 1]),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scores", [PLAIN, Scores(2), Scores(20), *SCORES[4:]], ids=str)
def test_rows_with_drafts(scores: Scores, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(0)
    step = drafted(device)
    assert step.first_lens is not None
    cache = LayerCache(*(torch.randn(40, KV_HEADS, BLOCK_SIZE, DIM, device=device) for _ in "kv"))
    q = torch.randn(20, HEADS, DIM, device=device)
    backend = SDPAttention(spec(device, scores=scores))
    heads = per_head(scores, device)
    out = backend.run(q, cache, backend.plan(step), 0.125, heads)
    place = torch.arange(4, dtype=torch.int32, device=device)
    seen = torch.minimum(step.first_lens.unsqueeze(1) + place, step.seq_lens.unsqueeze(1)).flatten()
    expected = attention_reference(
        q.double(), cache.k.double(), cache.v.double(), step.seats.repeat_interleave(4), step.block_table,
        torch.arange(21, dtype=torch.int32, device=device), seen, 20, 0.125, scores, heads,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_caches_whose_layers_lie_between_one_another() -> None:
    """Every third block is this layer's."""
    torch.manual_seed(0)
    step = replace(drafted("cpu"), num_queries=1, first_lens=None, num_tokens=5, seq_lens_host=[40, 19, 128, 4, 1],
                   query_start_host=list(range(6)))  # fmt: skip
    whole = torch.randn(40, 3, KV_HEADS, BLOCK_SIZE, DIM)
    cache = LayerCache(whole[:, 1], whole[:, 2])
    q = torch.randn(5, HEADS, DIM)
    backend = SDPAttention(spec(planes=3))
    out = backend.run(q, cache, backend.plan(step), 0.125)
    expected = attention_reference(
        q, cache.k.contiguous(), cache.v.contiguous(), step.seats, step.block_table, torch.arange(6), step.seq_lens, 5,
        0.125,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_planning_and_running_wait_for_nothing() -> None:
    step = replace(drafted("cuda"), num_queries=1, first_lens=None, num_tokens=5, seq_lens_host=[40, 19, 128, 4, 1],
                   query_start_host=list(range(6)))  # fmt: skip
    cache = LayerCache(*(torch.randn(40, KV_HEADS, BLOCK_SIZE, DIM, device="cuda") for _ in "kv"))
    q = torch.randn(5, HEADS, DIM, device="cuda")
    backend = SDPAttention(spec("cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.run(q, cache, backend.plan(step), 0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_it_refuses() -> None:
    assert SDPAttention.refuses(spec()) is None
    for changes, said in [
        ({"num_heads": 5}, "5 heads"),
        ({"dtype": torch.float8_e4m3fn}, "16 bits"),
        ({"kv_dtype": torch.float8_e4m3fn}, "no cache of"),
        ({"kv_dtype": torch.bfloat16}, "does not go with"),
    ]:
        assert said in (SDPAttention.refuses(spec(**changes)) or "")
