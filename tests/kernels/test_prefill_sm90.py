"""The prefill kernel for compute capability 9.0: compiled anywhere, run where there is such a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.kernels.attention.paged import attention_reference
from quire.kernels.attention.scores import Scores
from tests.kernels.compare import assert_near
from tests.kernels.test_paged_attention import make_cache

pytest.importorskip("triton")

from quire.kernels.attention.triton import prefill_schedule
from tests.kernels.gluon import ON_DEVICE, TESTED, assert_assembles_well


@TESTED
@pytest.mark.parametrize(
    ("group", "dim", "window", "dtype", "max_query_len"),
    [(4, 128, 0, "bf16", 8192), (7, 64, 100, "fp16", 1), (2, 256, 1024, "bf16", 8192), (1, 96, 0, "bf16", 1)],
)
def test_compiles_to_overlapping_matrix_products(
    group: int, dim: int, window: int, dtype: str, max_query_len: int, tmp_path: Path
) -> None:
    from triton.experimental.gluon import language as gl

    from quire.kernels.attention.triton import prefill_sm90

    desc = f"tensordesc<{dtype}[1, 1, 16, 64],{gl.NVMMASharedLayout(128, 16, 4)!r}>"
    block_n, stages = prefill_sm90.shape(dim, max_query_len)
    constants = {
        "KV_HEADS": 2, "GROUP": group, "DIM": dim, "PAGE": 16, "WINDOW": window, "LINES": prefill_sm90.LINES,
        "WIDTH": prefill_sm90.width(dim), "BLOCK_N": block_n, "STAGES": stages, "PDL": True,
    }  # fmt: skip
    types = {"q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "k_desc": desc, "v_desc": desc, "scale": "fp32"}
    types |= dict.fromkeys(("items_ptr", "table_ptr"), "*i32")
    types |= dict.fromkeys(("num_items", "q_stride", "table_stride"), "i32")
    aligned = ("q_ptr", "out_ptr", "items_ptr", "q_stride")
    assert_assembles_well(prefill_sm90._prefill_sm90_kernel, types, constants, aligned, tmp_path)


def check(
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    window: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    spread: float = 1.0,
) -> None:
    """rows: (query tokens, tokens in all) of each. spread: of the scores."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    queries, seq_lens = [q for q, _ in rows], [n for _, n in rows]
    seen_from = [max(0, n - q + 1 - (window or n)) for q, n in rows]
    cache = make_cache(seq_lens, kv_heads, dim, 16, dtype, device, seen_from=seen_from)
    q = torch.randn(sum(queries), heads, dim, device=device, dtype=dtype) * spread
    from quire.kernels.attention.triton import prefill_sm90 as sm90

    assert sm90.takes(dtype, heads, kv_heads, dim, 16)
    starts = torch.tensor([5, *queries]).cumsum(0).int().to(device)
    lens = torch.tensor(seq_lens, device=device).int()
    tiles = prefill_schedule.tiles(cache.seats, starts, lens, len(q), max(queries), sm90.tokens(heads // kv_heads))
    out = torch.full((len(q), heads * dim), float("nan"), device=device, dtype=dtype)
    sm90.prefill(q, cache.k, cache.v, cache.table, tiles, max(queries), dim**-0.5, window, out)
    expected = attention_reference(
        q, cache.k, cache.v, cache.seats, cache.table, starts, lens, len(rows), dim**-0.5, Scores(window)
    )
    assert_near(out, expected, dtype)


class TestOnDevice:
    pytestmark = ON_DEVICE

    def test_few_tokens_far_into_a_prompt(self) -> None:
        check([(100, 20_000), (1, 16_385), (17, 17)], heads=8, kv_heads=2, dim=128)

    def test_it_runs_for_few_tokens_only_if_they_are_far(self) -> None:
        from quire.kernels.attention.paged import prefill_schedule, prefill_wave

        ints = [torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([1], [0, 100], [20_000])]
        shape = (100, 100, 32, 8, 128, 16, torch.bfloat16)
        assert prefill_schedule(*ints, *shape).tiles is None
        assert prefill_schedule(*ints, *shape, is_far=True).tiles is not None
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        assert prefill_wave(32, 8, 128, 16, torch.bfloat16, torch.device("cuda")) == processors // 8 * 32

    @pytest.mark.parametrize("longest", [2000, 900])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim", "window", "dtype"),
        [
            (16, 8, 128, 0, torch.bfloat16),
            (32, 8, 128, 0, torch.float16),
            (8, 8, 64, 0, torch.bfloat16),
            (28, 4, 128, 300, torch.bfloat16),
            (64, 1, 64, 33, torch.float16),
            (16, 8, 256, 0, torch.bfloat16),
            (8, 4, 256, 300, torch.bfloat16),
            (8, 8, 96, 0, torch.bfloat16),
            (6, 2, 80, 100, torch.float16),
            (3, 1, 192, 0, torch.bfloat16),
        ],
    )
    def test_ragged_rows(
        self, heads: int, kv_heads: int, dim: int, window: int, dtype: torch.dtype, longest: int
    ) -> None:
        """Ends on, before and past the ends of tiles and pages; new rows and rows with a past; either tile."""
        rows = [
            (1, 1), (128, 128), (129, 129), (127, 4096), (1, 2000), (513, 2048), (longest, 2000), (33, 1040), (15, 15),
            (16, 16), (17, 17), (700, 3001), (64, 128), (3, 130),
        ]  # fmt: skip
        check(rows, heads, kv_heads, dim, window, dtype)

    @pytest.mark.parametrize("rows", [[(6000, 9000), (1, 12000), (3000, 3000)], [(7001, 9001)], [(77, 77)]])
    def test_items_are_dealt(self, rows: list[tuple[int, int]]) -> None:
        """More and fewer of them than blocks; many rows and one."""
        check(rows, 16, 8, 128)

    @pytest.mark.parametrize("dim", [64, 112, 128, 256])
    @pytest.mark.parametrize("spread", [4.0, 16.0])
    def test_maxima_that_grow(self, dim: int, spread: float) -> None:
        """By so much that sums are rescaled again and again, in some warps and not in others."""
        check([(1500, 1500), (300, 5000), (40, 700)], 8, 2, dim, spread=spread)

    def test_many_rows_find_their_tiles(self) -> None:
        """More rows than one look at query_start covers."""
        check([(1 + i % 5, 1 + i % 5 + i % 40) for i in range(700)], 4, 2, 64)
