"""Backends over latent rows: what the step's rows see, with drafts too, and who refuses such a cache by what name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.attention.base import (
    AttentionBackend,
    AttentionInputs,
    AttentionSpec,
    ExpandingBackend,
    HeadDims,
    LayerCache,
    PromptWork,
    Scores,
)
from quire.attention.library import refuses_as_all_do
from quire.attention.sdpa import SDPAttention
from quire.attention.select import select
from quire.attention.torch_cpu import TorchCPUAttention
from quire.attention.triton import TritonAttention
from quire.attention.triton_mla import TritonLatentAttention
from quire.kernels.attention import latent_expanded
from quire.kernels.dispatch import INTERPRETED
from tests.kernels.latent.test_latent_attention import attend, make_cache

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


@pytest.mark.parametrize(
    ("make", "device", "dtype", "rank", "rope", "made"),
    [
        pytest.param(TorchCPUAttention, "cpu", torch.float32, 32, 16, HeadDims(12, 20), id="torch_cpu"),
        pytest.param(TorchCPUAttention, "cpu", torch.bfloat16, 32, 8, HeadDims(4, 20), id="torch_cpu, wide values"),
        pytest.param(SDPAttention, "cpu", torch.float32, 32, 16, HeadDims(12, 20), id="sdpa"),
        pytest.param(SDPAttention, "cuda", torch.float16, 32, 16, HeadDims(16, 16), id="sdpa-cuda", marks=GPU),
        pytest.param(
            TritonLatentAttention, "cuda", torch.bfloat16, 512, 64, HeadDims(128, 128), id="triton_mla-cuda", marks=GPU
        ),
    ],
)
@pytest.mark.parametrize(
    "rows", [[(130, 130)], [(1, 30), (1, 7), (9, 9), (60, 101)], [(40, 40), (3, 4)], [(1, 9), (600, 640)]], ids=len
)
def test_prompts_in_the_expanded_form(
    make: Any, device: str, dtype: torch.dtype, rank: int, rope: int, made: HeadDims, rows: list[tuple[int, int]]
) -> None:
    """Beside decode rows, which are absorbed: what prompts' heads see of the rows, in float64."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if make is TritonLatentAttention and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("there all is absorbed")
    torch.manual_seed(1)
    on, size = torch.device(device), 16
    counts, lengths = [count for count, _ in rows], [length for _, length in rows]
    starts = [sum(counts[:i]) for i in range(len(rows) + 1)]
    decodes = sum(count == 1 for count in counts)
    cache = make_cache(lengths, rank + rope, size, dtype, on)
    cache.rows.nan_to_num_(50.0)
    tensors = (torch.tensor(values, dtype=torch.int32, device=on) for values in (starts, lengths))
    query_start, seq_lens = tensors
    pairs = sum(q * (2 * n - q + 1) // 2 for q, n in rows[decodes:])
    inputs = AttentionInputs(
        num_rows=len(rows), num_tokens=starts[-1], num_decodes=decodes, max_query_len=max(counts[decodes:]),
        max_seq_len=max(lengths), seats=cache.seats, query_start=query_start, seq_lens=seq_lens,
        block_table=cache.table, prompts=PromptWork(sum(lengths[decodes:]), pairs),
        seats_host=cache.seats.tolist(), query_start_host=starts, seq_lens_host=lengths,
    )  # fmt: skip
    backend = make(
        spec(device, dtype=dtype, kv_dtype=dtype, head_dim=rank + rope, value_dim=rank, block_size=size, made=made)
    )
    plan = backend.plan(inputs)
    assert isinstance(backend, ExpandingBackend)
    assert backend.absorbed(plan) == decodes
    q = torch.randn(starts[-1] - decodes, HEADS, made.nope + rope, dtype=dtype, device=on)
    weight = torch.randn(HEADS, sum(made), rank, dtype=dtype, device=on) * rank**-0.5
    kept, out = LayerCache(cache.rows, cache.rows[..., :rank]), torch.full_like(q[..., :1], torch.nan)
    out = out.expand(-1, -1, made.value).contiguous()
    backend.run_expanded(q, kept, weight, plan, 0.2, out)
    if decodes:
        absorbing = torch.randn(decodes, HEADS, rank + rope, dtype=dtype, device=on)
        found = backend.run(absorbing, kept, plan, 0.2)
        exact = [attend(absorbing[i : i + 1], cache.tokens[i], rank, 0.2) for i in range(decodes)]
        assert (found.cpu().double() - torch.cat(exact)).norm() / torch.cat(exact).norm() <= LIMITS[dtype]
    for row, (count, _) in enumerate(rows[decodes:], decodes):
        first, tokens = starts[row] - decodes, cache.tokens[row]
        columns = torch.einsum("tr,hcr->htc", tokens[:, :rank], weight.double().cpu())
        shared = tokens[:, rank:].expand(HEADS, -1, -1)
        keys, values = torch.cat([columns[..., : made.nope], shared], 2), columns[..., made.nope :]
        for j in (0, count // 2, count - 1):
            seen = len(tokens) - count + j + 1
            weights = torch.einsum("hc,htc->ht", q[first + j].double().cpu(), keys[:, :seen]) * 0.2
            exact_one = torch.einsum("ht,htc->hc", weights.softmax(-1), values[:, :seen])
            assert (out[first + j].cpu().double() - exact_one).norm() / exact_one.norm() <= LIMITS[dtype], (row, j)


def plain_kernel(
    q: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, columns: int, rank: int, items: torch.Tensor,
    counter: torch.Tensor, first_head: int, scale: float, out: torch.Tensor,
) -> None:  # fmt: skip
    """What `latent_prompt_sm90.attend` does with its arguments."""
    assert counter[0] == 0
    counter[0] = 5
    nope = q.shape[2] - (rows.shape[1] - rank)
    made = kv.view(len(kv), -1, columns).float()
    heads = slice(first_head, first_head + made.shape[1])
    for token, alive, length, start in items.tolist():
        for j in range(min(alive, 128)):
            seen = slice(start, start + length - alive + j + 1)
            query = q[token + j, heads].float()
            scores = torch.einsum("hc,thc->ht", query[:, :nope], made[seen, :, :nope])
            scores += query[:, nope:] @ rows[seen, rank:].float().T
            mixed = torch.einsum("ht,thc->hc", (scores * scale).softmax(-1), made[seen, :, nope:])
            out[token + j, heads] = mixed.to(out.dtype)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("room", [512 * 2**20, 220 * (48 + 3 * 32) * 2])
def test_what_the_kernel_for_prompts_gets(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Rows behind decode rows, gathered and cut into items, all heads at once or a few; padding stays as it was."""
    from quire.kernels.attention.triton import latent_prompt_sm90

    monkeypatch.setattr(latent_prompt_sm90, "attend", plain_kernel)
    monkeypatch.setattr(latent_expanded, "takes", lambda *_: True)
    monkeypatch.setattr(latent_expanded, "WORKSPACE_BYTES", room)
    torch.manual_seed(1)
    rows, on, made, dtype = [(1, 30), (1, 7), (9, 9), (150, 211)], torch.device("cpu"), HeadDims(12, 20), torch.float16
    counts, lengths = [count for count, _ in rows], [length for _, length in rows]
    cache = make_cache(lengths, RANK + ROPE, SIZE, dtype, on)
    starts = [sum(counts[:i]) for i in range(len(rows) + 1)]
    query_start, seq_lens = (torch.tensor(values, dtype=torch.int32) for values in (starts, lengths))
    inputs = AttentionInputs(
        num_rows=4, num_tokens=starts[-1] + 5, num_decodes=2, max_query_len=150, max_seq_len=211, seats=cache.seats,
        query_start=query_start, seq_lens=seq_lens, block_table=cache.table,
        prompts=PromptWork(220, 45 + 150 * 211 - 150 * 149 // 2),
    )  # fmt: skip
    backend = TritonLatentAttention(spec(dtype=dtype, kv_dtype=dtype, made=made))
    plan = backend.plan(inputs)
    assert backend.absorbed(plan) == 2
    assert plan.expanded is not None
    assert plan.expanded.heads == (HEADS if room > 2**20 else 3)
    q = torch.randn(starts[-1] + 5 - 2, HEADS, made.nope + ROPE, dtype=dtype)
    weight = torch.randn(HEADS, sum(made), RANK, dtype=dtype) * RANK**-0.5
    out = torch.full((len(q), HEADS, made.value), 3.0, dtype=dtype)
    for _ in range(2):  # as layers do
        backend.run_expanded(q, LayerCache(cache.rows, cache.rows[..., :RANK]), weight, plan, 0.2, out)
    expected = latent_expanded.attend_reference(
        q[:-5].double(), cache.rows.double().nan_to_num(0), weight.double(), cache.table, cache.seats[2:],
        query_start[2:], seq_lens[2:], 0.2,
    )  # fmt: skip
    found = out[:-5].flatten(1).double()
    assert (found - expected).norm() / expected.norm() <= LIMITS[dtype]
    assert (out[-5:] == 3).all()


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
