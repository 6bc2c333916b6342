"""The list of tiles of prompt rows, against the same made in Python."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.dispatch import device_on_triton

prefill_schedule = pytest.importorskip("quire.kernels.attention.triton.prefill_schedule")


def expected(seats: list[int], queries: list[int], seq_lens: list[int], tokens: int) -> list[list[int]]:
    level = max(prefill_schedule.LEVEL_TOKENS // tokens, 1)
    tiles = []
    for row, (query_len, seq_len) in enumerate(zip(queries, seq_lens, strict=True)):
        for tile in range(-(-query_len // tokens)):
            rank = (seq_len - query_len) // tokens + tile
            token = sum(queries[:row]) + tile * tokens
            tiles.append((-(rank // level), row, -rank, [token, query_len - tile * tokens, seq_len, seats[row]]))
    return [entry for *_, entry in sorted(tiles)]


@pytest.mark.parametrize(("num_rows", "tokens"), [(1, 2), (1, 128), (7, 32), (7, 300), (70, 18)])
def test_tiles_stand_from_the_longest_to_the_shortest(device: torch.device, num_rows: int, tokens: int) -> None:
    if not device_on_triton(device):
        pytest.skip("plain torch needs no list")
    torch.manual_seed(num_rows * tokens)
    queries = torch.randint(0, 60 if num_rows > 7 else 700, (num_rows,)).tolist()  # rows of graphs may be empty
    queries[-1] = 333
    seq_lens = [n + extra for n, extra in zip(queries, torch.randint(0, 900, (num_rows,)).tolist(), strict=True)]
    seats = torch.randperm(num_rows).add(1).tolist()
    tensors = (torch.tensor(values, device=device, dtype=torch.int32) for values in (seats, [9, *queries], seq_lens))
    seat, starts, lens = tensors
    bound = sum(queries) + 20  # a graph's tokens, more than there are
    items = prefill_schedule.tiles(seat, starts.cumsum(0).int(), lens, bound, max(queries) + 5, tokens).tolist()
    real = expected(seats, queries, seq_lens, tokens)
    assert items[: len(real)] == real
    assert items[len(real) :] == [[0] * 4] * (bound // tokens + num_rows - len(real))
