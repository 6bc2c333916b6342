"""What adapters add to a product, by the definition: each row its own."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.low_rank.factors import Factors, blocks_of
from quire.kernels.low_rank.product import add_low_rank, expand
from quire.kernels.low_rank.rows import adapter_rows
from tests.kernels.compare import LIMITS, NARROW, assert_near

SLOTS, ROOM = 3, 32


def factors(device: torch.device, parts: tuple[int, ...], k: int, dtype: torch.dtype) -> Factors:
    """Of ranks 32, 0 and 5; lines behind a rank are what was there before."""
    ends = tuple(sum(parts[: i + 1]) for i in range(len(parts)))
    ranks = torch.tensor([32, 0, 5], dtype=torch.int32)
    down = torch.randn(SLOTS, len(parts), ROOM, k)
    up = torch.randn(SLOTS, ends[-1], ROOM) / ROOM
    down[2, :, 5:], up[2, :, 5:] = 0, 0
    gains = torch.empty(SLOTS, ends[-1]).uniform_(0.5, 2)
    kept = (down.view(SLOTS, -1, k).to(dtype), up.to(dtype), gains, ranks)
    blocks = torch.tensor(blocks_of(ends), dtype=torch.int32)
    return Factors(*(t.to(device) for t in kept), ends=ends, blocks=blocks.to(device))


def expected(
    y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, given: Factors, bias: torch.Tensor | None
) -> torch.Tensor:
    wide = y.double().cpu()
    for row, slot in enumerate(slots.tolist()):
        if slot == 0 or given.ranks[slot - 1] == 0:
            continue
        down, up, gain = (t[slot - 1].double().cpu() for t in (given.down, given.up, given.gains))
        inner = (down @ x[row].double().cpu()).view(len(given.ends), ROOM)
        begins = (0, *given.ends[:-1])
        added = [up[b:e] @ inner[p] for p, (b, e) in enumerate(zip(begins, given.ends, strict=True))]
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
    result = add_low_rank(y, x, adapter_rows(slots, SLOTS), given, bias)
    assert result.data_ptr() == y.data_ptr()
    assert_near(result, wanted, dtype)
    alone = (slots == 0) | (slots == 2)
    assert torch.equal(result[alone], untouched[alone]), "rows without an adapter are not even rounded"


def test_logits_are_wider_than_their_factors(device: torch.device) -> None:
    given = factors(device, (150,), 64, NARROW)
    slots = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    x, y = (torch.randn(3, 64) / 8).to(device, NARROW), torch.randn(3, 150, device=device)
    wanted = expected(y, x, slots, given, None)
    result = add_low_rank(y, x, adapter_rows(slots, SLOTS), given)
    assert result.dtype == torch.float32
    difference = (result.double().cpu() - wanted).norm() / wanted.norm()
    assert difference <= LIMITS[NARROW]


def test_many_rows_in_high_tiles(device: torch.device) -> None:
    given = factors(device, (64,), 32, torch.float32)
    slots = torch.randint(0, SLOTS + 1, (1100,), dtype=torch.int32, device=device)
    inner, y = torch.randn(1100, ROOM, device=device), torch.zeros(1100, 64, device=device)
    inner[slots == 3, 5:] = 0
    result = expand(y, inner, adapter_rows(slots, SLOTS), given)
    up = given.up[(slots.long() - 1).clamp(min=0)]
    wanted = torch.einsum("mr,mnr->mn", inner, up) * ((slots == 1) | (slots == 3))[:, None]
    assert_near(result, wanted, torch.float32)


@pytest.mark.parametrize("slots", [[0, 0, 0], [3], [1] * 40 + [2] * 3 + [0] * 30 + [3] * 17])
def test_tiles_hold_every_row_with_an_adapter_once(device: torch.device, slots: list[int]) -> None:
    rows = adapter_rows(torch.tensor(slots, dtype=torch.int32, device=device), SLOTS)
    if rows.tiles is None:
        found = {slot: sorted(members.tolist()) for slot, members in rows.members}
    else:
        found = {}
        for slot, tile in zip(rows.tiles.slots.tolist(), rows.tiles.rows.tolist(), strict=True):
            there = [row for row in tile if row >= 0]
            assert bool(slot) == bool(there)
            found.setdefault(slot, []).extend(there)
        found.pop(0, None)
    assert found == {slot: [i for i, one in enumerate(slots) if one == slot] for slot in set(slots) - {0}}
