"""Backends over latent rows: what the step's rows see, with drafts too, and who refuses such a cache by what name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.attention.base import AttentionBackend, AttentionInputs, AttentionSpec, LayerCache, Scores
from quire.attention.library import refuses_as_all_do
from quire.attention.sdpa import SDPAttention
from quire.attention.select import select
from quire.attention.torch_cpu import TorchCPUAttention
from quire.attention.triton import TritonAttention
from quire.attention.triton_mla import TritonLatentAttention
from quire.kernels.dispatch import INTERPRETED
from tests.kernels.test_latent_attention import attend, make_cache

HEADS, RANK, ROPE, SIZE = 5, 32, 16, 4
GPU = pytest.mark.gpu
BACKENDS = [
    pytest.param(TorchCPUAttention, "cpu", torch.float32, id="torch_cpu"),
    pytest.param(SDPAttention, "cpu", torch.float32, id="sdpa"),
    pytest.param(SDPAttention, "cuda", torch.float32, id="sdpa-cuda", marks=GPU),
    pytest.param(TritonLatentAttention, "cpu", torch.float16, id="triton_mla"),
    pytest.param(TritonLatentAttention, "cuda", torch.bfloat16, id="triton_mla-cuda", marks=GPU),
]
LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def spec(device: str = "cpu", **changes: Any) -> AttentionSpec:
    shape: dict[str, Any] = {
        "num_heads": HEADS, "num_kv_heads": 1, "head_dim": RANK + ROPE, "block_size": SIZE, "dtype": torch.float32,
        "kv_dtype": torch.float32, "device": torch.device(device), "max_rows": 8, "max_tokens": 256, "max_seq_len": 640,
        "value_dim": RANK, "planes": 1,
    }  # fmt: skip
    return AttentionSpec(**shape | changes)


def run(
    make: Callable[[AttentionSpec], AttentionBackend], device: str, dtype: torch.dtype, rows: list[tuple[int, int]],
    queries: int = 1,
) -> None:  # fmt: skip
    """rows: (queries, tokens in all) of each; with `queries` of each decode row, where the first number is how many of
    them are real."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if make is TritonLatentAttention and device == "cpu" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    torch.manual_seed(1)
    on = torch.device(device)
    counts, lengths = [count for count, _ in rows], [length for _, length in rows]
    cache = make_cache(lengths, RANK + ROPE, SIZE, dtype, on)
    cache.rows.nan_to_num_(50.0)  # what is masked must be finite for kernels that mask scores alone
    seats, starts = cache.seats.tolist(), [sum(counts[:i]) for i in range(len(rows) + 1)]
    drafted = queries > 1
    decodes = len(rows) if drafted else sum(count == 1 for count in counts)
    tokens = len(rows) * queries if drafted else starts[-1]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=on)

    inputs = AttentionInputs(
        num_rows=len(rows), num_tokens=tokens, num_decodes=decodes, max_query_len=max([*counts[decodes:], 0]),
        max_seq_len=max(lengths), seats=cache.seats, query_start=ints(starts), seq_lens=ints(lengths),
        block_table=cache.table, num_queries=queries,
        first_lens=ints([n - count + 1 for count, n in rows]) if drafted else None,
        seats_host=None if drafted else seats, query_start_host=None if drafted else starts,
        seq_lens_host=None if drafted else lengths,
    )  # fmt: skip
    q = torch.randn(tokens, HEADS, RANK + ROPE, dtype=dtype, device=on)
    backend = make(spec(device, dtype=dtype, kv_dtype=dtype, drafted=(8, queries) if drafted else (0, 1)))
    found = backend.run(q, LayerCache(cache.rows, cache.rows[..., :RANK]), backend.plan(inputs), 0.2)
    assert found.shape == (tokens, HEADS * RANK)
    for row, (count, _) in enumerate(rows):
        first = row * queries if drafted else starts[row]
        own = slice(first, first + count)
        exact = attend(q[own], cache.tokens[row], RANK, 0.2)
        assert (found[own].cpu().double() - exact).norm() / exact.norm() <= LIMITS[dtype], row


@pytest.mark.parametrize(("make", "device", "dtype"), BACKENDS)
@pytest.mark.parametrize("rows", [[(1, 1)], [(1, 30), (1, 7), (9, 9), (6, 41)], [(40, 40), (3, 90)]], ids=len)
def test_steps(make: Any, device: str, dtype: torch.dtype, rows: list[tuple[int, int]]) -> None:
    run(make, device, dtype, rows)


@pytest.mark.parametrize(("make", "device", "dtype"), BACKENDS)
def test_rows_with_drafts(make: Any, device: str, dtype: torch.dtype) -> None:
    run(make, device, dtype, [(3, 30), (1, 7), (2, 2), (3, 66)], queries=3)


def test_who_refuses_latent_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select("auto", spec(), "cpu").name == "torch_cpu"
    assert "latent rows (MLA) alone" in (TritonLatentAttention.refuses(spec(value_dim=0)) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    half = {"dtype": torch.float16, "kv_dtype": torch.float16}
    assert "for triton_mla" in (TritonAttention.refuses(spec("cuda", **half)) or "")
    assert "latent rows" in (refuses_as_all_do(spec("cuda", **half, num_heads=4, head_dim=64), (64,)) or "")
    for changes, said in [
        ({}, "float32"),
        ({**half, "value_dim": 640, "head_dim": 704}, "640 + 64"),
        ({**half, "scores": Scores(softcap=3.0)}, "products of queries and rows"),
    ]:
        assert said in (TritonLatentAttention.refuses(spec("cuda", **changes)) or "")
