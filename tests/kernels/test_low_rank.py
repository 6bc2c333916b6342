"""What adapters add to a product, by the definition: each row its own."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.dispatch import device_on_triton, on_triton
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm.decode_gemm import has_gluon
from quire.kernels.gemm.linear import linear, linear_reference
from quire.kernels.low_rank.factors import Factors
from quire.kernels.low_rank.product import expand, expand_gated_and_shrink, shrink
from quire.kernels.low_rank.rows import AdapterRows, adapter_rows
from quire.kernels.low_rank.with_product import linear_and_shrink
from tests.kernels.compare import LIMITS, NARROW, assert_near

SLOTS, ROOM = 3, 32
RANKS = [(32, 0), (0, 1), (5, 1)]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def added(
    y: torch.Tensor, x: torch.Tensor, rows: AdapterRows, given: Factors, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Both halves."""
    return expand(y, shrink(x, rows, given), rows, given, bias)


def factors(
    device: torch.device,
    parts: tuple[int, ...],
    k: int,
    dtype: torch.dtype,
    ranks: list[tuple[int, int]] = RANKS,
    room: int = ROOM,
) -> Factors:
    """ranks: of each slot, and whether it has gains; what lies behind a rank, or is no gain, is not read."""
    ends, slots = tuple(sum(parts[: i + 1]) for i in range(len(parts))), len(ranks)
    down = torch.randn(slots, len(parts), room, k)
    up = torch.randn(slots, room, ends[-1]) / room
    gains = torch.empty(slots, ends[-1]).uniform_(0.5, 2)
    for slot, (rank, has_gains) in enumerate(ranks):
        down[slot, :, rank:], up[slot, rank:] = torch.nan, torch.nan
        if not has_gains:
            gains[slot] = torch.nan
    kept = (down.view(slots, -1, k).to(dtype), up.to(dtype), gains, *(ints(each) for each in (ranks, [0, *ends])))
    return Factors(*(t.to(device) for t in kept), ends=ends)


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def expected(
    y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, given: Factors, bias: torch.Tensor | None
) -> torch.Tensor:
    wide = y.double().cpu()
    for row, slot in enumerate(slots.tolist()):
        rank, has_gains = (0, 0) if slot == 0 else given.ranks[slot - 1].tolist()
        if not rank:
            continue
        down, up, gain = (t[slot - 1].double().cpu() for t in (given.down, given.up, given.gains))
        gain = gain if has_gains else torch.ones_like(gain)
        inner = down.view(len(given.ends), given.room, -1)[:, :rank] @ x[row].double().cpu()
        begins = (0, *given.ends[:-1])
        added = [inner[p] @ up[:rank, b:e] for p, (b, e) in enumerate(zip(begins, given.ends, strict=True))]
        plain = wide[row] if bias is None else wide[row] - bias.double().cpu()
        wide[row] = plain * gain + torch.cat(added) + (0 if bias is None else bias.double().cpu())
    return wide


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize(
    ("rows", "parts", "k", "biased"),
    [(1, (64,), 96, False), (7, (128, 32, 32), 80, True), (70, (200, 136), 64, False), (40, (48,), 1040, True)],
)
def test_each_row_gets_its_own(
    device: torch.device, rows: int, parts: tuple[int, ...], k: int, biased: bool, dtype: torch.dtype
) -> None:
    given = factors(device, parts, k, dtype)
    slots = torch.randint(0, SLOTS + 1, (rows,), dtype=torch.int32, device=device)
    slots[0] = 3
    x = (torch.randn(rows, k) / k**0.5).to(device, dtype)
    y = torch.randn(rows, sum(parts)).to(device, dtype)
    bias = torch.randn(sum(parts)).to(device, dtype) if biased else None
    wanted = expected(y, x, slots, given, bias)
    untouched = y.clone()
    result = added(y, x, adapter_rows(slots, SLOTS), given, bias)
    assert result.data_ptr() == y.data_ptr()
    assert_near(result, wanted, dtype)
    alone = (slots == 0) | (slots == 2)
    assert torch.equal(result[alone], untouched[alone]), "rows without an adapter are not even rounded"


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize(("rows", "n", "biased"), [(1, 1, False), (9, 60, True), (70, 1, False)])
def test_few_wide_outputs(device: torch.device, rows: int, n: int, biased: bool, dtype: torch.dtype) -> None:
    """Logits of experts, and the one of a shared expert's gate, are float32 whatever the factors are."""
    given = factors(device, (n,), 96, dtype)
    slots = torch.randint(0, SLOTS + 1, (rows,), dtype=torch.int32, device=device)
    x, y = (torch.randn(rows, 96) / 10).to(device, dtype), torch.randn(rows, n, device=device)
    bias = torch.randn(n, device=device) if biased else None
    wanted = expected(y, x, slots, given, bias)
    assert_near(added(y, x, adapter_rows(slots, SLOTS), given, bias), wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 96), (9, 40, 2064), (90, 264, 80)])
def test_what_follows_a_product(device: torch.device, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """The gate, and the sum with a residual: of rows without an adapter too."""
    given = factors(device, (n, n), k, dtype)
    slots = torch.randint(0, SLOTS + 1, (rows,), dtype=torch.int32, device=device)
    x, y = (torch.randn(rows, k) / k**0.5).to(device, dtype), torch.randn(rows, 2 * n).to(device, dtype)
    bias, residual = torch.randn(2 * n).to(device, dtype), torch.randn(rows, 2 * n).to(device, dtype)
    wanted, own = expected(y, x, slots, given, bias), adapter_rows(slots, SLOTS)
    inner = shrink(x, own, given)
    gate, up = wanted.chunk(2, dim=1)
    found = expand(y.clone(), inner, own, given, bias, gated=True)
    assert_near(found, torch.nn.functional.silu(gate) * up, dtype)
    wanted += residual.double().cpu()
    found = expand(y, inner, own, given, bias, residual=residual)
    assert found.data_ptr() == residual.data_ptr()
    assert_near(found, wanted, dtype)


def test_no_row_changes_another_one(device: torch.device) -> None:
    """Bit for bit, in tiles and batches of whatever size."""
    given = factors(device, (64, 32), 2100, NARROW)
    slots = torch.randint(1, SLOTS + 1, (75,), dtype=torch.int32, device=device)
    x, y = torch.randn(75, 2100).to(device, NARROW), torch.randn(75, 96).to(device, NARROW)
    together = added(y.clone(), x, adapter_rows(slots, SLOTS), given)
    if not on_triton(x):
        pytest.skip("the library cuts products up by their size")
    for row in (0, 7, 74):
        one = slice(row, row + 1)
        alone = added(y[one].clone(), x[one], adapter_rows(slots[one], SLOTS), given)
        assert torch.equal(together[one], alone)


@pytest.mark.parametrize("slot", [0, 1, 2, 3])
@pytest.mark.parametrize(("parts", "k", "apart"), [((70,), 96, False), ((40, 24, 24), 1504, True)])
def test_one_row_in_the_product_s_kernel(
    device: torch.device, parts: tuple[int, ...], k: int, apart: bool, slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not device_on_triton(device):
        pytest.skip("the kernels need a GPU, or an interpreter")
    from quire.kernels.gemm import decode_gemm
    from quire.kernels.gemm.triton.plan import Vector

    given, n = factors(device, parts, k, NARROW), sum(parts)
    rows = adapter_rows(torch.tensor([slot], dtype=torch.int32, device=device), SLOTS)
    x, weight = torch.randn(1, k).to(device, NARROW), (torch.randn(n, k) / k**0.5).to(device, NARROW)
    bias, norm = torch.randn(n).to(device, NARROW), ((torch.rand(k) + 0.5).to(device, NARROW), 1e-5)
    monkeypatch.setattr(decode_gemm, "plan", lambda *_, **__: Vector(4, 512, 2, apart=apart))
    both = linear_and_shrink(x, weight, bias, norm, rows, given, summed=False)
    assert both is not None
    y, inner = both
    assert_near(y, linear_reference(x, weight, bias, norm=norm), NARROW)
    rank = int(given.ranks[slot - 1, 0]) if slot else 0
    lines = given.down[slot - 1].view(len(parts), ROOM, k)[:, :rank].flatten(0, 1)
    if rank:
        found = inner.view(len(parts), ROOM)[:, :rank].flatten()[None]
        assert_near(found, linear_reference(x, lines, norm=norm), NARROW)
    wanted = expected(y, rms_norm(x, *norm), rows.slots, given, bias)
    assert_near(expand(y.clone(), inner, rows, given, bias), wanted, NARROW)


def test_logits_are_wider_than_their_factors(device: torch.device) -> None:
    given = factors(device, (150,), 64, NARROW)
    slots = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    x, y = (torch.randn(3, 64) / 8).to(device, NARROW), torch.randn(3, 150, device=device)
    wanted = expected(y, x, slots, given, None)
    result = added(y, x, adapter_rows(slots, SLOTS), given)
    assert result.dtype == torch.float32
    difference = (result.double().cpu() - wanted).norm() / wanted.norm()
    assert difference <= LIMITS[NARROW]


def test_many_rows_in_high_tiles(device: torch.device) -> None:
    given = factors(device, (64,), 32, torch.float32)
    slots = torch.randint(0, SLOTS + 1, (1100,), dtype=torch.int32, device=device)
    inner, y = torch.randn(1, 1100, ROOM, device=device), torch.zeros(1100, 64, device=device)
    inner[0, slots == 3, 5:] = torch.nan
    result = expand(y, inner, adapter_rows(slots, SLOTS), given)
    up = given.up.nan_to_num()[(slots.long() - 1).clamp(min=0)]
    wanted = torch.einsum("mr,mrn->mn", inner[0].nan_to_num(), up) * ((slots == 1) | (slots == 3))[:, None]
    assert_near(result, wanted, torch.float32)


@pytest.mark.parametrize("slots", [[0, 0, 0], [3], [], [1] * 40 + [2] * 3 + [0] * 30 + [3] * 17, [2, 0, 1] * 400])
def test_tiles_hold_every_row_once(device: torch.device, slots: list[int]) -> None:
    rows = adapter_rows(torch.tensor(slots, dtype=torch.int32, device=device), SLOTS)
    if rows.tiles is None:
        found = {slot: sorted(members.tolist()) for slot, members in rows.members}
    else:
        found = {}
        for slot, tile in zip(rows.tiles.slots.tolist(), rows.tiles.rows.tolist(), strict=True):
            there = [row for row in tile if row >= 0]
            assert (slot >= 0) == bool(there)
            found.setdefault(slot, []).extend(there)
        assert list(found) == sorted(found, key=lambda slot: (slot < 0, slot)), "empty tiles come last"
        found.pop(-1, None)
        found.pop(0, None)
    assert found == {slot: [i for i, one in enumerate(slots) if one == slot] for slot in set(slots) - {0}}


class TestOnDevice:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("rows", [1, 2, 15, 17, 64, 129, 300])
    @pytest.mark.parametrize(
        ("parts", "k"),
        [((40,), 100), ((72, 56, 8), 1111), ((1024, 264), 4096), ((2056,), 14336), ((2048, 512, 512), 1536)],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_ranks_of_all_sizes(self, rows: int, parts: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
        """Among slots that nobody has, and adapters that leave the matrix alone."""
        torch.manual_seed(rows)
        ranks = [(1, 0), (5, 1), (0, 0), (8, 0), (16, 0), (17, 1), (0, 0), (40, 0), (64, 1), (64, 0)]
        given = factors(torch.device("cuda"), parts, k, dtype, ranks, 64)
        slots = ints([0, 1, 2, 4, 5, 6, 8, 9])[torch.randint(0, 8, (rows,))].cuda()
        x, y = (torch.randn(rows, k) / k**0.5).to("cuda", dtype), torch.randn(rows, sum(parts)).to("cuda", dtype)
        bias = torch.randn(sum(parts)).to("cuda", dtype)
        wanted, own = expected(y, x, slots, given, bias), adapter_rows(slots, len(ranks))
        inner, residual = shrink(x, own, given), torch.randn(rows, sum(parts)).to("cuda", dtype)
        start = residual.clone()
        assert_near(expand(y.clone(), inner, own, given, bias, residual=residual), wanted + start.double().cpu(), dtype)
        assert_near(added(y, x, own, given, bias), wanted, dtype)

    def test_programs_that_take_several_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As with many more rows than these."""
        if not has_gluon(torch.device("cuda")):
            pytest.skip("kernels in Gluon")
        from quire.kernels.low_rank.triton import expand_ring, shrink_registers

        for kernels in (expand_ring, shrink_registers):
            monkeypatch.setattr(kernels, "num_processors", lambda _: 1)
        torch.manual_seed(0)
        given = factors(torch.device("cuda"), (1664, 384, 384), 1536, torch.bfloat16, [(16, 1), (5, 0), (0, 0)], 16)
        slots = torch.randint(0, 4, (90,), dtype=torch.int32, device="cuda")
        x, y = (torch.randn(90, 1536) / 40).cuda().bfloat16(), torch.randn(90, 2432).cuda().bfloat16()
        wanted = expected(y, x, slots, given, None)
        assert_near(added(y, x, adapter_rows(slots, 3), given), wanted, torch.bfloat16)

    @pytest.mark.parametrize(("rows", "n"), [(1, 512), (20, 640), (90, 1040), (300, 2048)])
    @pytest.mark.parametrize("biased", [False, True])
    def test_the_gate_and_the_first_half_of_what_follows(
        self, rows: int, n: int, biased: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of adapters that have either, both or none; few programs take many blocks."""
        if not has_gluon(torch.device("cuda")):
            pytest.skip("kernels in Gluon")
        from quire.kernels.low_rank.triton import expand_ring

        monkeypatch.setattr(expand_ring, "num_processors", lambda _: 2)
        torch.manual_seed(0)
        device, k, dtype = torch.device("cuda"), 512, torch.bfloat16
        given = factors(device, (n, n), k, dtype, [(16, 1), (5, 0), (0, 0), (8, 0)], 16)
        reader = factors(device, (256,), n, dtype, [(8, 0), (0, 0), (16, 0), (5, 1)], 16)
        slots = torch.randint(0, 5, (rows,), dtype=torch.int32, device=device)
        x, y = (torch.randn(rows, k) / k**0.5).to(device, dtype), torch.randn(rows, 2 * n).to(device, dtype)
        bias = torch.randn(2 * n).to(device, dtype) if biased else None
        own = adapter_rows(slots, 4)
        inner = shrink(x, own, given)
        gate, up = expected(y, x, slots, given, bias).chunk(2, dim=1)
        out, its = expand_gated_and_shrink(y.clone(), inner, own, given, bias, reader)
        assert_near(out, torch.nn.functional.silu(gate) * up, dtype)
        assert (its is not None) == (rows > 1), "one row is for programs of one block"
        if its is None:
            return
        start = torch.randn(rows, 256).to(device, dtype)
        assert_near(expand(start.clone(), its, own, reader), expected(start, out, slots, reader, None), dtype)
        assert torch.equal(out, expand(y.clone(), inner, own, given, bias, gated=True))

    @pytest.mark.parametrize("rows", [1, 5, 33, 200])
    def test_a_captured_chain_gives_what_single_steps_give(self, rows: int) -> None:
        """Kernels that start before their predecessor has ended see its results: bit for bit, in a graph or alone."""
        torch.manual_seed(0)
        device, sizes = torch.device("cuda"), (((256, 128, 128), 512), ((512,), 256), ((384, 384), 512), ((512,), 384))
        ranks = [(8, 0), (16, 1), (3, 0), (16, 0)]

        def drawn(parts: tuple[int, ...], k: int) -> tuple[torch.Tensor, Factors]:
            weight = torch.randn(sum(parts), k).to(device, torch.bfloat16) / 20
            return weight, factors(device, parts, k, torch.bfloat16, ranks, 16)

        layers = [[drawn(*each) for each in sizes] for _ in range(8)]
        slots = torch.randint(0, 5, (rows,), dtype=torch.int32, device=device)
        gain, start = torch.ones(512, device=device).bfloat16(), torch.randn(rows, 512, device=device).bfloat16()
        residual = torch.empty_like(start)

        def step(wait: bool) -> torch.Tensor:
            def done(y: torch.Tensor) -> torch.Tensor:
                if wait:
                    torch.cuda.synchronize()
                return y

            own = adapter_rows(slots, len(ranks))
            residual.copy_(start)
            for layer in layers:
                x = done(rms_norm(residual, gain, 1e-5))
                for number, (weight, given) in enumerate(layer):
                    inner = done(shrink(x, own, given))
                    y, to = done(linear(x, weight)), residual if number % 2 else None
                    y = done(expand(y, inner, own, given, gated=number == 2, residual=to))
                    x = (y[:, :256], rms_norm(residual, gain, 1e-5), y, y)[number]
            return residual

        wanted = step(wait=True).clone()
        assert bool(wanted.isfinite().all())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(wait=False)
        for _ in range(50):
            found.zero_()
            graph.replay()
            assert torch.equal(found, wanted)

    @pytest.mark.parametrize("rows", [2, 8, 16, 40, 64, 100])
    @pytest.mark.parametrize("k", [1024, 4096])
    def test_the_first_half_runs_beside_the_product(self, rows: int, k: int) -> None:
        """In a graph, bit for bit what one kernel after the other gives: products that share K have sums in memory that
        is free again when the first half's is asked for."""
        torch.manual_seed(0)
        device, parts = torch.device("cuda"), (k // 2, k // 4, k // 4)
        if not has_gluon(device):
            pytest.skip("kernels in Gluon")
        ranks = [(8, 0), (16, 1), (3, 0), (16, 0)]
        layers = [
            (torch.randn(k, k, device=device).bfloat16() / k**0.5, factors(device, parts, k, torch.bfloat16, ranks, 16))
            for _ in range(6)
        ]
        slots = torch.randint(0, 5, (rows,), dtype=torch.int32, device=device)
        norm, start = (torch.ones(k, device=device).bfloat16(), 1e-5), torch.randn(rows, k, device=device).bfloat16()
        own = adapter_rows(slots, len(ranks))

        def one_by_one() -> torch.Tensor:
            x = start
            for weight, given in layers:
                x = rms_norm(x, *norm)
                inner = shrink(x, own, given)
                torch.cuda.synchronize()
                y = linear(x, weight)
                torch.cuda.synchronize()
                x = expand(y, inner, own, given)
                torch.cuda.synchronize()
            return x

        def at_once() -> torch.Tensor:
            x = start
            for weight, given in layers:
                both = linear_and_shrink(x, weight, None, norm, own, given, summed=False)
                assert both is not None
                x = expand(*both, own, given)
            return x

        wanted = one_by_one()
        assert bool(wanted.isfinite().all())
        assert torch.equal(at_once(), wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = at_once()
        for _ in range(50):
            found.zero_()
            graph.replay()
            assert torch.equal(found, wanted)
