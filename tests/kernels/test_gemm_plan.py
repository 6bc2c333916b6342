"""Every plan that the rule makes for a dense shape is one that a kernel can run, and is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.kernels.gemm import decode_gemm
from quire.kernels.gemm.linear import linear, linear_reference
from quire.kernels.gemm.triton.plan import (
    MAX_ROWS,
    RING_COLUMNS,
    RING_STEP,
    Ahead,
    Plan,
    Registers,
    Ring,
    Shared,
    Tiles,
    Vector,
    parts_to_rotate,
    parts_to_sum,
    plan,
)
from tests.kernels.compare import assert_near

ROWS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128]
PROCESSOR_BYTES = 227 * 1024  # of shared memory, for one program
WORKSPACE, COUNTERS = 1 << 23, 4096  # of `batch_gemm`

Product = tuple[int, int, bool, bool]  # outputs, K, gated, residual


def products(hidden: int, inner: int, heads: int, kv_heads: int, dim: int, vocab: int) -> list[Product]:
    """qkv, output, gate and up, down, logits."""
    return [
        ((heads + 2 * kv_heads) * dim, hidden, False, False),
        (hidden, heads * dim, False, True),
        (inner, hidden, True, False),
        (hidden, inner, False, True),
        (vocab, hidden, False, False),
    ]


def shapes() -> Iterator[Product]:
    """Of dense models of 0.1 to 100 billion weights, and their shards."""
    for hidden in [
        64,
        512,
        576,
        896,
        1024,
        1536,
        2048,
        2304,
        2560,
        2816,
        2880,
        3072,
        3584,
        4096,
        4608,
        5120,
        6144,
        8192,
    ]:
        for ratio in (2.5, 2.67, 3, 3.5, 4, 5.4, 8):
            for heads, kv_heads, dim in ((max(hidden // 64, 1), max(hidden // 256, 1), 64), (32, 8, 128), (28, 4, 128)):
                yield from products(hidden, int(hidden * ratio) // 8 * 8, heads, kv_heads, dim, 151936)


def check(how: Plan, m: int, n: int, k: int, gated: bool, width: int = 2) -> None:
    """width: bytes of an element of the weight."""
    times = 2 if gated else 1
    if isinstance(how, Vector):
        assert m == 1
        assert times * how.outputs * how.width // (32 * how.warps) <= 128, "registers a thread"
    elif isinstance(how, Shared):
        assert 2 <= m <= 16 or (width == 1 and m == 1)
        rows = 8 if m <= 8 else 16
        assert how.stages * how.warps * (how.outputs * width + rows * 2) * how.step <= PROCESSOR_BYTES
    elif isinstance(how, Registers):
        assert m <= 16
        lines = max(how.outputs * times, 16)
        assert how.outputs % 8 == 0
        assert how.step % 64 == 0
        assert min(how.depth, -(-k // (how.step * how.warps))) * lines * how.step * width // 128 <= 192, (
            "registers a thread"
        )
    elif isinstance(how, Ring):
        rows = 1 if m == 1 else 8 if m <= 8 else 16
        kept = rows * -(-k // (RING_COLUMNS * how.split)) * RING_COLUMNS * 2
        sums = 8 * 16 * max(rows, 8) * 4  # of 8 warps
        assert m <= 16
        assert how.stages >= 2
        assert how.split == 1 or not gated, "parts of a gate are none"
        assert how.programs * (how.stages * (RING_STEP + 16) + kept + sums + 1024) <= PROCESSOR_BYTES + 1024
    elif isinstance(how, Ahead):
        assert 16 < m <= MAX_ROWS
        assert how.lines in (32, 64)
        assert how.parts == 1
    else:
        stage = (how.block_m + times * how.block_n) * how.block_k * width
        assert how.num_stages >= 2
        assert how.num_stages * stage <= PROCESSOR_BYTES - 512
        sums = times * how.block_m * how.block_n // (32 * how.num_warps)
        assert sums <= 128, "registers a thread"
        assert how.block_m >= m, "the weight is read once"
        assert all(size & (size - 1) == 0 for size in (how.block_m, how.block_n, how.block_k))
        tiles, steps = -(-n // how.block_n), -(-k // how.block_k)
        assert 1 <= how.split <= max(steps, 1)
        if how.split > 1:
            assert tiles * how.split * how.block_m * how.block_n * times <= WORKSPACE
            assert tiles <= COUNTERS


@pytest.mark.parametrize(("bulk", "ahead"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("m", ROWS)
def test_every_plan_fits_the_hardware(m: int, bulk: bool, ahead: bool) -> None:
    seen = 0
    for n, k, gated, residual in shapes():
        how = plan(m, n, k, gated=gated, residual=residual, bulk=bulk, ahead=ahead and not residual)
        assert ahead or not isinstance(how, Ahead)
        if how is None:
            assert m > (64 if bulk else 16), "products of few rows never go through the library"
            continue
        assert bulk or not isinstance(how, Tiles)
        check(how, m, n, k, gated)
        seen += 1
    assert seen or m > (64 if bulk else 16)


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_of_one_graph_size_have_one_plan(ahead: bool) -> None:
    """So a batch padded to the next size costs what that size costs: between heights of tiles nothing changes."""
    for n, k, gated, residual in shapes():
        for low, high in ((2, 8), (9, 16), (17, 32), (33, 64), (65, 128)):
            plans = {
                plan(m, n, k, gated=gated, residual=residual, bulk=True, ahead=ahead) for m in range(low, high + 1)
            }
            assert len(plans) == 1


def test_columns_that_fill_no_turn_and_rounds_that_are_not_full_have_other_kernels() -> None:
    """2,880 columns, and 720 programs of four outputs; 2,560 and 3,072, and 640 and 768, are as they were."""

    def of_one(n: int, k: int, *, residual: bool = False) -> type[Plan]:
        return type(plan(1, n, k, gated=False, residual=residual, bulk=True))

    assert [of_one(5120, k) for k in (2560, 2880, 3072)] == [Vector, Registers, Vector]
    assert [of_one(n, 4096, residual=True) for n in (2560, 2880, 3072)] == [Vector, Registers, Vector]
    outputs = [
        plan(8, n, k, gated=False, residual=False, bulk=True) for n, k in ((5120, 2880), (5120, 3072), (4096, 2880))
    ]
    assert outputs == [Registers(16, 128, 1, 8), Registers(32, 128, 1, 8), Registers(32, 128, 1, 8)]


def test_long_products_of_few_outputs_share_k_where_narrow_tiles_leave_processors_idle() -> None:
    """2,560 outputs are 80 narrow tiles, or 40 wide ones in three shares; 2,048 and 4,096 fill as many either way."""

    def cut(n: int, k: int) -> tuple[int, int]:
        how = plan(64, n, k, gated=False, residual=False, bulk=True)
        assert isinstance(how, Tiles)
        return how.block_n, how.split

    assert cut(2560, 8192) == (64, 3)
    assert [cut(n, 8192) for n in (2048, 3072, 4096)] == [(32, 2), (32, 1), (32, 1)]
    assert cut(2560, 4096) == (32, 1)


def test_weights_that_are_there_first_where_nothing_is_added() -> None:
    """Products of one GPU, and of ranks: lines of a tile, of 64 and of 128 rows."""

    def lines(n: int, k: int, *, gated: bool = False, residual: bool = False) -> list[int | None]:
        plans = [plan(m, n, k, gated=gated, residual=residual, bulk=True, ahead=True) for m in (64, 128)]
        return [how.lines if isinstance(how, Ahead) else None for how in plans]

    assert [lines(n, 4096) for n in (6144, 4096, 2048)] == [[64, None], [32, None], [None, None]]
    gated = [lines(n, 4096, gated=True) for n in (14336, 7168, 3584, 3072)]
    assert gated == [[64, None], [64, 64], [32, 32], [32, None]]
    assert lines(8192, 2048, residual=True) == [64, None]
    assert lines(128256, 4096) == [None, None]


def test_parts_for_who_adds_them_up() -> None:
    """Of a rank's products of queries, keys and values, and of those that a sum reads."""
    assert [parts_to_rotate(64, n, k) for n, k in ((1536, 4096), (2560, 8192), (2560, 2048))] == [5, 3, 3]
    assert [parts_to_rotate(64, n, k) for n, k in ((6144, 4096), (4096, 2048), (2048, 1024))] == [1, 1, 1]
    assert [parts_to_sum(64, n, k) for n, k in ((4096, 3584), (2048, 2048), (4096, 1024))] == [2, 4, 2]
    assert [parts_to_sum(m, 4096, 3584) for m in (16, 17, 128, 129)] == [1, 2, 2, 1]
    assert [parts_to_sum(64, n, k) for n, k in ((8192, 7168), (4096, 512), (256, 8192))] == [1, 1, 8]


def test_no_plan_beyond_its_rows_or_without_a_gpu() -> None:
    assert plan(MAX_ROWS + 1, 4096, 4096, gated=False, residual=False, bulk=True) is None
    x, weight = torch.randn(1, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    assert decode_gemm.plan(x, weight, gated=False, residual=False) is None


ODD = {  # hidden, inner, heads, KV heads, head dimension, vocabulary
    "even": (1024, 3072, 16, 8, 128, 4096),
    "narrow": (576, 1536, 9, 3, 64, 49152),
    "4b": (2560, 9728, 32, 8, 128, 5000),
    "deep": (896, 4864, 14, 2, 64, 33000),
    "7b": (3584, 18944, 28, 4, 128, 40008),
    "14b": (5120, 17408, 40, 8, 128, 1000),
    "20b": (2880, 2880, 64, 8, 64, 40008),
    "odd": (1352, 2088, 13, 1, 104, 1111),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 16, 17, 32, 47, 64, 65, 100, 128])
@pytest.mark.parametrize("shape", ODD)
def test_products_of_odd_shapes(shape: str, m: int, biased: bool) -> None:
    torch.manual_seed(m)
    for n, k, gated, residual in products(*ODD[shape]):
        x, gain = torch.randn(m, k, device="cuda").bfloat16(), (torch.rand(k, device="cuda") + 0.5).bfloat16()
        lines = 2 * n if gated else n
        weight = (torch.randn(lines, k, device="cuda") / k**0.5).bfloat16()
        bias = torch.randn(lines, device="cuda").bfloat16() if biased else None
        norm = None if residual else (gain, 1e-6)
        start = torch.randn(m, n, device="cuda").bfloat16() if residual else None
        expected = linear_reference(x, weight, bias, norm=norm, gated=gated, residual=start)

        y, again = (
            linear(x, weight, bias, norm=norm, gated=gated, residual=None if start is None else start.clone())
            for _ in range(2)
        )
        assert_near(y, expected, torch.bfloat16)
        assert torch.equal(again, y), "not the same twice"
