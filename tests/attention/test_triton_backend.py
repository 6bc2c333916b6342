from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from quire.attention.base import PLAIN, AttentionSpec, PerHead, Scores, SharedPrefix, prefix_tile_rows, prefix_tiles
from quire.attention.context import AttentionInputs, LayerCache
from quire.attention.sdpa import SDPAttention
from quire.attention.torch_cpu import TorchCPUAttention
from quire.attention.triton import TritonAttention
from quire.kernels.attention import paged as paged_attention

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 4, 2, 64, 16
SCORES = [
    PLAIN,
    Scores(20),
    Scores(softcap=0.3),
    Scores(20, softcap=0.3),
    Scores(sinks=True),
    Scores(20, sinks=True),
    Scores(slopes=True),
    Scores(24, chunked=True),
    Scores(20, chunked=True, softcap=0.5, sinks=True, slopes=True),
]


def per_head(scores: Scores, device: str = "cpu", heads: int = HEADS) -> PerHead:
    """Sinks as large as scores are, and larger; slopes as ALiBi has them."""
    sinks = torch.linspace(-1.0, 3.0, heads, device=device) if scores.sinks else None
    slopes = 0.5 ** torch.arange(1, heads + 1, device=device).float() if scores.slopes else None
    return PerHead(sinks, slopes)


def spec(device: str = "cpu", **changes: object) -> AttentionSpec:
    shape: dict = {
        "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "block_size": BLOCK_SIZE,
        "dtype": torch.float32, "kv_dtype": torch.float32, "device": torch.device(device), "max_rows": 8,
        "max_tokens": 64, "max_seq_len": 128,
    }  # fmt: skip
    return AttentionSpec(**(shape | changes))


def inputs(queries: list[int], seq_lens: list[int], num_decodes: int, device: str) -> AttentionInputs:
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    return AttentionInputs(
        num_rows=len(queries), num_tokens=sum(queries), num_decodes=num_decodes,
        max_query_len=max(queries[num_decodes:], default=0), max_seq_len=max(seq_lens),
        seats=ints(list(range(1, len(queries) + 1))), query_start=ints(starts), seq_lens=ints(seq_lens),
        block_table=torch.arange((len(queries) + 1) * 8, dtype=torch.int32, device=device).view(-1, 8),
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("num_decodes", [0, 2, 4])
def test_decodes_and_prefills_in_one_batch(num_decodes: int, scores: Scores, device: str) -> None:
    """A decode row is a prefill row of one token: wherever the line between them is drawn, the result is the same."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(0)
    queries, seq_lens = ([1, 1, 1, 1], [40, 1, 100, 17]) if num_decodes == 4 else ([1, 1, 30, 5], [40, 1, 100, 5])
    step = inputs(queries, seq_lens, num_decodes, device)
    cache = LayerCache(*(torch.randn(40, KV_HEADS, BLOCK_SIZE, DIM, device=device) for _ in "kv"))
    q = torch.randn(sum(queries), HEADS, DIM, device=device)
    backend, heads = TritonAttention(spec(device, scores=scores)), per_head(scores, device)
    out = backend.run(q, cache, backend.plan(step), 0.125, heads)
    expected = paged_attention.attention_reference(
        q.double(), cache.k.double(), cache.v.double(), step.seats, step.block_table, step.query_start, step.seq_lens,
        4, 0.125, scores, heads,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "scores", [PLAIN, Scores(50), Scores(softcap=0.3), Scores(sinks=True), Scores(slopes=True)], ids=str
)
def test_shared_prefixes_change_nothing(scores: Scores, device: str) -> None:
    """Three of four decode rows begin with the same two blocks; a catch-up row follows them."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(0)
    queries, seq_lens = [1, 1, 1, 1, 6], [40, 90, 100, 33, 30]
    step = inputs(queries, seq_lens, 4, device)
    for seat in (3, 4):
        step.block_table[seat, :2] = step.block_table[1, :2]
    prefix = SharedPrefix(
        *(torch.tensor(values, dtype=torch.int32, device=device) for values in (
            [32, 0, 32, 32], [2, 0, 3, 0], [[4, 0, 3, 32]] + [[0, 0, 0, 0]] * (prefix_tiles(4, HEADS // KV_HEADS) - 1),
        ))
    )  # fmt: skip
    cache = LayerCache(*(torch.randn(48, KV_HEADS, BLOCK_SIZE, DIM, device=device) for _ in "kv"))
    q = torch.randn(sum(queries), HEADS, DIM, device=device)
    backend, heads = TritonAttention(spec(device, scores=scores)), per_head(scores, device)
    out = backend.run(q, cache, backend.plan(replace(step, prefix=prefix)), 0.125, heads)
    expected = paged_attention.attention_reference(
        q.double(), cache.k.double(), cache.v.double(), step.seats, step.block_table, step.query_start, step.seq_lens,
        5, 0.125, scores, heads,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_tiles_of_prefixes_never_outnumber_the_room_for_them() -> None:
    pytest.importorskip("triton")
    from quire.kernels.attention.triton import decode_prefix

    for group in (1, 2, 4, 7, 16, 43, 64):
        for rows in range(2, 200):
            held = prefix_tile_rows(group)
            assert held == decode_prefix.lines(group) // group >= 2
            worst = max(rows // size * -(-size // held) for size in range(2, min(rows, 3 * held) + 1))
            assert worst <= prefix_tiles(rows, group)


def test_rows_with_very_many_heads_share_no_prefix() -> None:
    pytest.importorskip("triton")
    assert prefix_tile_rows(71) == 1
    assert [TritonAttention(spec(num_heads=heads, num_kv_heads=1)).prefix_support for heads in (64, 71)] == [
        True,
        False,
    ]


def test_refuses_what_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cpu" in (TritonAttention.refuses(spec()) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for changes, said in [
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 512}, "512"),
        ({"num_heads": 5}, "5 heads"),
        ({"num_heads": 1024, "num_kv_heads": 2}, "512 query heads"),
    ]:
        assert said in (TritonAttention.refuses(spec("cuda", **changes)) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    assert "Old GPU" in (TritonAttention.refuses(spec("cuda")) or "")


CUTS = [(7,), (1, 2), (3, 20), (12, 13, 30), (36, 37)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_pieces_of_a_step_attend_as_the_step_does(cuts: tuple[int, ...], scores: Scores, device: str) -> None:
    """Tokens of three decode rows, two prompts and padding, cut anywhere."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(0)
    queries, seq_lens = [1, 1, 1, 28, 5], [40, 1, 33, 100, 5]
    step = replace(inputs(queries, seq_lens, 3, device), num_tokens=40)
    cache = LayerCache(*(torch.randn(48, KV_HEADS, BLOCK_SIZE, DIM, device=device) for _ in "kv"))
    q = torch.randn(40, HEADS, DIM, device=device)
    heads = per_head(scores, device)
    hosts = {
        "seats_host": step.seats.tolist(),
        "query_start_host": step.query_start.tolist(),
        "seq_lens_host": seq_lens,
    }
    for make in (TritonAttention, SDPAttention, *([TorchCPUAttention] if device == "cpu" else [])):
        backend = make(spec(device, scores=scores))
        told = replace(step, **hosts) if backend.reads_host else step
        whole = backend.run(q, cache, backend.plan(told), 0.125, heads)[: sum(queries)]
        found = []
        for first, last in itertools.pairwise([0, *cuts, 40]):
            piece = told.piece(first, last)
            assert piece.num_tokens == last - first
            found.append(backend.run(q[first:last], cache, backend.plan(piece), 0.125, heads))
        torch.testing.assert_close(torch.cat(found)[: sum(queries)], whole, rtol=1e-4, atol=1e-5)
