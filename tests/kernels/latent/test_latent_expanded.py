"""Latent attention in the expanded form: rows out of the cache, when it pays, and the kernel for capability 9.0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.kernels.attention import latent_expanded
from quire.kernels.attention.latent_expanded import HeadDims, PromptWork
from tests.kernels.compare import NARROW, assert_near

pytest.importorskip("triton")

from tests.kernels.gluon import ON_DEVICE, TESTED, assert_assembles_well
from tests.kernels.latent.test_latent_attention import attend, ints, make_cache

DEEPSEEK = HeadDims(128, 128)


def test_rows_lie_one_behind_the_other(device: torch.device) -> None:
    """Of blocks in any order, with zeros behind the last one's end; counters begin at 0."""
    for seq_lens in ([1], [40, 3, 17, 16, 64], [5] * 90):
        cache = make_cache(seq_lens, 24, 8, NARROW, device)
        starts = ints([sum(seq_lens[:i]) for i in range(len(seq_lens))], device)
        total, counters = sum(seq_lens), ints([7, 8, 9], device)
        out = torch.full((total + 21, 24), float("nan"), dtype=NARROW, device=device)
        lengths = ints(seq_lens, device)
        latent_expanded.gather_rows(cache.rows, cache.table, cache.seats, starts, lengths, counters, out)
        torch.testing.assert_close(out[:total].double().cpu(), torch.cat(cache.tokens), rtol=0, atol=0)
        assert (out[total:] == 0).all()
        assert (counters == 0).all()


def test_rows_of_8_bits_are_widened(device: torch.device) -> None:
    cache = make_cache([30, 5], 16, 8, torch.float32, device)
    narrow = cache.rows.nan_to_num(0).to(torch.float8_e4m3fn)
    out = torch.empty(35, 16, dtype=NARROW, device=device)
    starts, lengths, counters = ints([0, 30], device), ints([30, 5], device), ints([1], device)
    latent_expanded.gather_rows(narrow, cache.table, cache.seats, starts, lengths, counters, out)
    expected = torch.cat(cache.tokens).float().to(torch.float8_e4m3fn).double()
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=0)


def test_both_forms_are_the_same() -> None:
    """What the kernel is compared with, and the absorbed form, in float64."""
    device, heads, rank, rope, dims = torch.device("cpu"), 3, 20, 8, HeadDims(12, 10)
    torch.manual_seed(0)
    cache = make_cache([30, 7], rank + rope, 8, torch.float64, device)
    weight = torch.randn(heads, sum(dims), rank, dtype=torch.float64)
    q = torch.randn(9 + 7, heads, dims.nope + rope, dtype=torch.float64)
    found = latent_expanded.attend_reference(
        q, cache.rows, weight, cache.table, cache.seats, ints([0, 9, 16], device), ints([30, 7], device), 0.2
    )
    keys, values = weight.split(list(dims), 1)
    queries = torch.cat([torch.einsum("thn,hnr->thr", q[..., : dims.nope], keys), q[..., dims.nope :]], 2)
    rows = [attend(part, cache.tokens[i], rank, 0.2) for i, part in enumerate(queries.split([9, 7]))]
    expected = torch.einsum("thr,hvr->thv", torch.cat(rows).view(16, heads, rank), values).flatten(1)
    torch.testing.assert_close(found, expected)


def test_it_pays_where_rows_have_many_queries() -> None:
    def pays(rows: list[tuple[int, int]]) -> bool:
        pairs = sum(q * (2 * n - q + 1) // 2 for q, n in rows)
        work = PromptWork(sum(n for _, n in rows), pairs)
        return latent_expanded.pays(work, sum(q for q, _ in rows), 512, 64, DEEPSEEK)

    assert pays([(4096, 4096)])
    assert pays([(1024, 16384)])
    assert pays([(16, 16)])  # as many rows as queries: nothing is made that the absorbed form would not make
    assert not pays([(16, 16384)])
    assert not pays([(128, 8192)] * 8)


def test_heads_fill_the_device() -> None:
    times = latent_expanded.heads_at_a_time
    assert times(128, 500, 8, 132) == 128
    assert times(128, 63, 8, 132) == 49  # 3 rounds and 3 rounds and 2 rounds; 63: 4, 4 and 1
    assert times(16, 5, 64, 132) == 4
    assert times(16, 1, 64, 132) == 1


@TESTED
@pytest.mark.parametrize(("nope", "value", "dtype"), [(128, 128, "bf16"), (64, 128, "fp16"), (64, 64, "bf16")])
def test_compiles_to_overlapping_matrix_products(nope: int, value: int, dtype: str, tmp_path: Path) -> None:
    from triton.experimental.gluon import language as gl

    from quire.kernels.attention.triton import latent_prompt_sm90 as kernels

    def described(lines: int) -> str:
        return f"tensordesc<{dtype}[{lines}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"

    constants = {
        "HEADS": 16, "RANK": 512, "NOPE": nope, "VALUE": value, "LINES": kernels.LINES, "BLOCK_N": kernels.BLOCK_N,
        "STAGES": kernels.STAGES, "PDL": True,
    }  # fmt: skip
    types = {"q_desc": described(kernels.LINES), "kv_desc": described(kernels.BLOCK_N)}
    types |= {"rows_desc": described(kernels.BLOCK_N), "out_ptr": f"*{dtype}", "scale": "fp32"}
    types |= dict.fromkeys(("items_ptr", "counter_ptr"), "*i32")
    types |= dict.fromkeys(("num_items", "heads", "section", "first_head"), "i32")
    assert_assembles_well(kernels._latent_prompt_sm90_kernel, types, constants, ("out_ptr", "items_ptr"), tmp_path)


def check(
    rows: list[tuple[int, int]],
    heads: int,
    dims: HeadDims = DEEPSEEK,
    rank: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    kept: torch.dtype | None = None,
    room: int = 1 << 30,
    padding: int = 0,
) -> None:
    """rows: (query tokens, tokens in all) of each. kept: the type of the cache. room: elements of the workspace."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    queries, seq_lens = [q for q, _ in rows], [n for _, n in rows]
    cache = make_cache(seq_lens, rank + 64, 16, torch.float32 if kept else dtype, device)
    latents = cache.rows.nan_to_num(0).to(kept) if kept else cache.rows
    weight = torch.randn(heads, sum(dims), rank, device=device, dtype=dtype) * rank**-0.5
    q = torch.randn(sum(queries) + padding, heads, dims.nope + 64, device=device, dtype=dtype)
    starts, lens = ints([5 + sum(queries[:i]) for i in range(len(rows) + 1)], device), ints(seq_lens, device)
    assert latent_expanded.takes(rank, 64, dims, dtype, device)
    plan = latent_expanded.schedule(
        cache.seats, starts, lens, sum(seq_lens), len(q), max(queries), heads, rank + 64, dims, room
    )  # fmt: skip
    assert plan is not None
    workspace = torch.full((room,), float("nan"), device=device, dtype=dtype)
    scale = (dims.nope + 64) ** -0.5
    out = torch.full((len(q), heads * dims.value), float("nan"), device=device, dtype=dtype)
    for _ in range(2):  # as layers do
        latent_expanded.attend(q, latents, weight, cache.table, plan, scale, workspace, out)
    expected = latent_expanded.attend_reference(
        q[: sum(queries)], latents, weight.float(), cache.table, cache.seats, starts, lens, scale
    )
    assert_near(out[: sum(queries)], expected, dtype)


class TestOnDevice:
    pytestmark = ON_DEVICE

    @pytest.mark.parametrize("rows", [[(1, 1)], [(128, 128)], [(300, 300)], [(129, 1000)], [(7, 5000), (4000, 4000)]])
    def test_few_rows(self, rows: list[tuple[int, int]]) -> None:
        check(rows, 16)

    @pytest.mark.parametrize(
        ("heads", "dims", "rank", "dtype"),
        [
            (16, DEEPSEEK, 512, torch.bfloat16),
            (5, HeadDims(64, 64), 256, torch.float16),
            (32, HeadDims(64, 128), 256, torch.bfloat16),
        ],
    )
    def test_ragged_rows(self, heads: int, dims: HeadDims, rank: int, dtype: torch.dtype) -> None:
        """Ends on, before and past the ends of tiles and pages; new rows and rows with a past."""
        rows = [
            (1, 1), (128, 128), (129, 129), (127, 3000), (1, 2000), (513, 2048), (2000, 2000), (33, 1040), (15, 15),
            (16, 16), (17, 17), (700, 3001), (64, 128), (3, 130),
        ]  # fmt: skip
        check(rows, heads, dims, rank, dtype, padding=70)

    def test_heads_one_after_the_other(self) -> None:
        """There is room for a few at a time, of which the last ones are fewer."""
        check([(200, 700), (300, 300)], 10, room=1000 * (576 + 3 * 256) + 5000)

    @pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_rows_of_8_bits(self, kept: torch.dtype) -> None:
        check([(200, 700), (300, 300)], 16, kept=kept)

    def test_many_rows(self) -> None:
        check([(1 + i % 5, 1 + i % 5 + i % 40) for i in range(300)], 3)

    def test_no_room(self) -> None:
        one = ints([100], torch.device("cuda"))
        arguments = (one, ints([0, 100], torch.device("cuda")), one, 100, 100, 100, 16, 576, DEEPSEEK)
        assert latent_expanded.schedule(*arguments, 100 * (576 + 256)) is not None
        assert latent_expanded.schedule(*arguments, 100 * (576 + 256) - 1) is None
