"""`gather`, `gather_decode`, `commit` and `scatter`: against a slow reference, and Triton against torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire.kernels.dispatch import plain_torch
from quire.kernels.step import step
from quire.kernels.step.state import SeatState, StepBuffers

SEATS, BLOCKS, SIZE, TABLE = 9, 60, 16, 6


def state(seed: int, device: str) -> SeatState:
    rng = np.random.default_rng(seed)
    table = 1 + rng.permutation(BLOCKS - 1)[: (SEATS - 1) * TABLE].reshape(SEATS - 1, TABLE)
    table = np.concatenate([np.zeros((1, TABLE), int), table])
    computed = np.concatenate([[0], rng.integers(0, TABLE * SIZE - 40, SEATS - 1)])

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return SeatState(
        last_token=put(np.concatenate([[0], rng.integers(1, 1000, SEATS - 1)])),
        num_computed=put(computed),
        block_table=put(table),
        token_of_slot=torch.full((BLOCKS * SIZE,), -7, dtype=torch.int32, device=device),
        block_size=SIZE,
    )


def buffers(rows: int, tokens: int, device: str) -> StepBuffers:
    def poisoned(n: int) -> torch.Tensor:
        return torch.full((n,), -9, dtype=torch.int32, device=device)

    return StepBuffers(poisoned(tokens), poisoned(tokens), poisoned(tokens), poisoned(rows))


@pytest.fixture(params=["cpu", *(pytest.param(kind, marks=pytest.mark.gpu) for kind in ("cuda", "plain, cuda"))])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with plain_torch("plain" in request.param):
        yield "cuda" if "cuda" in request.param else "cpu"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("padding", [0, 3, 600])
def test_gather_finds_every_token(device: str, seed: int, padding: int) -> None:
    """Padded as in a graph: rows of seat 0 before and behind the real ones, tokens behind all of them."""
    rng = np.random.default_rng(100 + seed)
    seats = rng.permutation(np.arange(1, SEATS))[:5]
    lens = np.array(
        [1, 1, int(rng.integers(2, 40)), 1, int(rng.integers(1, 40))]
    )  # two decode rows, three that catch up
    decodes = 2
    if padding:
        seats, lens = np.array([0, 0, *seats, 0]), np.array([1, 1, *lens, 0])
        decodes = 4
    start = np.concatenate([[0], np.cumsum(lens)])
    ids = rng.integers(1, 1000, start[-1] - decodes)
    s, out = state(seed, device), buffers(len(seats), int(start[-1]) + padding, device)
    before = {name: getattr(s, name).cpu().numpy().copy() for name in ("last_token", "num_computed", "block_table")}

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    stale_ids = rng.integers(1, 1000, padding)  # what is left in a graph's memory by the step before
    step.gather(s, out, put(seats), put(start), put(np.concatenate([ids, stale_ids])), decodes, max(40, padding))
    token_of_slot = np.full(BLOCKS * SIZE, -7)
    for row, seat in enumerate(seats):
        for j in range(lens[row]):
            at = start[row] + j
            position = before["num_computed"][seat] + j
            slot = before["block_table"][seat, position // SIZE] * SIZE + position % SIZE
            token = before["last_token"][seat] if row < decodes else ids[at - decodes]
            token_of_slot[slot] = token
            assert (out.input_ids[at], out.positions[at], out.slots[at]) == (token, position, slot)
        assert out.seq_lens[row] == before["num_computed"][seat] + lens[row]
    assert np.array_equal(s.token_of_slot.cpu().numpy(), token_of_slot)
    behind = slice(int(start[-1]), None)
    assert (out.input_ids[behind] == 0).all()
    assert (out.positions[behind] == 0).all()
    assert (out.slots[behind] == -1).all(), "padding tokens are written nowhere"


@pytest.mark.parametrize("size", [4, 16, 24])
@pytest.mark.parametrize("padding", [0, 3, 500])
def test_slots_of_another_group(device: str, size: int, padding: int) -> None:
    """Its blocks lie elsewhere, and are of another size; padded as in a graph."""
    rng = np.random.default_rng(size)
    table = rng.permutation(np.arange(1, SEATS * 40)).tolist()[: (SEATS - 1) * 30]
    table = np.array([[0] * 30, *np.array(table).reshape(SEATS - 1, 30)])
    seats, lens, computed = [0, 3, 8, 1, 5, 0], [1, 1, 30, 1, 60, 0], [0, 7, 21, 0, 9, 0]
    start = np.concatenate([[0], np.cumsum(lens)])
    positions = np.concatenate([np.arange(n) + before for n, before in zip(lens, computed, strict=True)])

    def put(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    group = step.GroupTable(put(table), size)
    slots = torch.full((int(start[-1]) + padding,), -9, dtype=torch.int32, device=device)
    given = put(np.concatenate([positions, np.zeros(padding, int)]))
    known = torch.zeros_like(slots)
    known[7] = -1  # a token that is written nowhere
    step.find_slots(group, put(seats), put(start), given, known, slots, 60)
    rows = np.repeat(seats, lens)
    expected = table[rows, positions // size] * size + positions % size
    expected[7] = -1
    assert slots.tolist() == [*expected.tolist(), *[-1] * padding]
    for width in (1, 3):  # as many tokens of each row
        places = [(s, p + i) for s, p in zip(seats, computed, strict=True) for i in range(width)]
        each = torch.full((6 * width,), -9, dtype=torch.int32, device=device)
        step.find_slots(group, put(seats), None, put([p for _, p in places]), torch.zeros_like(each), each, 0)
        assert each.tolist() == [table[s, p // size] * size + p % size for s, p in places]


def test_decode_rows_and_padding(device: str) -> None:
    s, out = state(5, device), buffers(6, 6, device)
    seats = torch.tensor([3, 8, 1, 0, 0, 0], dtype=torch.int32, device=device)
    step.gather_decode(s, out, seats)
    rows = seats.long().cpu()
    computed, table = s.num_computed.cpu()[rows], s.block_table.cpu()[rows]
    assert torch.equal(out.input_ids.cpu(), s.last_token.cpu()[rows])
    assert torch.equal(out.positions.cpu(), computed)
    assert torch.equal(out.seq_lens.cpu(), computed + 1)
    block = table[torch.arange(6), (computed // SIZE).long()]
    assert torch.equal(out.slots.cpu(), block * SIZE + computed % SIZE)
    assert out.slots[3:].tolist() == [0, 0, 0], "padding writes to the null block"


@pytest.mark.parametrize("every_row", [True, False])
def test_commit_advances_real_seats_only(device: str, every_row: bool) -> None:
    s = state(6, device)
    seats = torch.tensor([2, 0, 7, 5], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([11, 12, 13, 14], dtype=torch.int32, device=device)
    out = torch.full((4,), -9, dtype=torch.int32, device=device)
    last, computed = s.last_token.cpu().clone(), s.num_computed.cpu().clone()
    if every_row:
        sampled, index = torch.tensor([100, 101, 102, 103], dtype=torch.int32, device=device), None
        expected = [100, 101, 102, 103]
    else:
        sampled = torch.tensor([200, 201], dtype=torch.int32, device=device)
        index = torch.tensor([1, -1, -1, 0], dtype=torch.int32, device=device)
        expected = [201, -1, -1, 200]
    step.commit(s, out, seats, seq_lens, sampled, index)
    assert out.tolist() == expected
    for seat, length, token in zip([2, 7, 5], [11, 13, 14], [expected[0], expected[2], expected[3]], strict=True):
        computed[seat] = length
        if token >= 0:
            last[seat] = token
    assert s.num_computed.tolist() == computed.tolist()
    assert s.last_token.tolist() == last.tolist()


def test_scatter(device: str) -> None:
    table = torch.zeros(50, 100, dtype=torch.int32, device=device)
    index = torch.randperm(5000)[:3000].to(torch.int32)
    values = torch.arange(3000, dtype=torch.int32)
    step.scatter(table, index.to(device), values.to(device))
    expected = torch.zeros(5000, dtype=torch.int32)
    expected[index.long()] = values
    assert torch.equal(table.cpu().view(-1), expected)
    step.scatter(table, index[:0].to(device), values[:0].to(device))
