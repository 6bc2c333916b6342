"""Decode over latent rows for compute capability 9.0: compiled anywhere, run where there is such a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.kernels.attention import latent_paged
from quire.kernels.attention.latent_rows import LatentRows
from tests.kernels.compare import assert_near
from tests.kernels.latent.test_latent_attention import attend, ints, make_cache

pytest.importorskip("triton")

from tests.kernels.gluon import ON_DEVICE, TESTED, assert_assembles_well


@TESTED
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_compiles_without_spills(heads: int, tmp_path: Path) -> None:
    from triton.experimental.gluon import language as gl

    from quire.kernels.attention.triton import latent_decode_sm90 as sm90

    q_layout, cache_layout = (gl.NVMMASharedLayout(128, 16, dims) for dims in (2, 3))
    types = {
        "q_desc": f"tensordesc<bf16[64, 64],{q_layout!r}>", "out_ptr": "*bf16", "scale": "fp32", "table_stride": "i32",
        "cache_desc": f"tensordesc<bf16[1, 16, 64],{cache_layout!r}>",
    }  # fmt: skip
    types |= dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32")
    types |= dict.fromkeys(("items_ptr", "heads_ptr", "table_ptr"), "*i32")
    constants = sm90.constants(heads, sm90.RANK, sm90.RANK + sm90.ROPE)
    assert_assembles_well(sm90._latent_sm90_kernel, types, constants, ("out_ptr", "partial_ptr", "items_ptr"), tmp_path)


def test_other_caches_keep_to_the_plain_kernel() -> None:
    from quire.kernels.attention.triton import latent_decode_sm90 as sm90

    assert sm90.takes(LatentRows(512, 64, 16, torch.bfloat16))
    for other in (
        LatentRows(256, 64, 16, torch.bfloat16), LatentRows(512, 32, 16, torch.bfloat16),
        LatentRows(512, 64, 64, torch.bfloat16), LatentRows(512, 64, 16, torch.float8_e4m3fn),
    ):  # fmt: skip
        assert not sm90.takes(other)


def check(seq_lens: list[int], heads: int, scale: float = 0.05) -> None:
    from quire.kernels.attention.triton import latent_decode

    device, dtype = torch.device("cuda"), torch.bfloat16
    torch.manual_seed(0)
    cache = make_cache(seq_lens, 576, 16, dtype, device)
    q = torch.randn(len(seq_lens), heads, 576, device=device, dtype=dtype)
    workspace = latent_paged.decode_workspace(len(seq_lens), heads, 512, 64, device).fill_(float("nan"))
    schedule = latent_paged.decode_schedule(
        cache.seats, ints(seq_lens, device), heads, LatentRows(512, 64, 16, dtype)
    )  # fmt: skip
    assert isinstance(schedule.shares, latent_decode.Schedule)
    assert schedule.shares.heads is not None
    rows = torch.cat([attend(q[i : i + 1], cache.tokens[i], 512, scale) for i in range(len(seq_lens))])
    for _ in range(2):  # as layers do
        out = torch.full((len(q), heads * 512), float("nan"), device=device, dtype=dtype)
        latent_paged.decode(q, cache.rows, 512, cache.table, schedule, scale, workspace, out)
        assert_near(out, rows, dtype)


class TestOnDevice:
    pytestmark = ON_DEVICE

    @pytest.mark.parametrize("heads", [4, 16, 20, 64, 72, 128])
    def test_ragged_rows(self, heads: int) -> None:
        """Ends on, before and past the ends of tiles and pages; pieces of one tile, and of odd and even numbers."""
        check([1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193, 1500, 5, 300, 7000], heads)

    def test_more_rows_than_programs(self) -> None:
        check([1 + 97 * i % 400 for i in range(300)], 16)

    @pytest.mark.parametrize("heads", [16, 128])
    def test_one_long_row(self, heads: int) -> None:
        check([32768], heads)

    @pytest.mark.parametrize("scale", [0.2, 1.0])
    def test_tops_that_grow(self, scale: float) -> None:
        """By so much that sums are rescaled again and again, in some warps and not in others."""
        check([700, 2000, 64], 16, scale)
