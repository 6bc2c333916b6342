"""How a step's latent rows are dealt out: every token once, pieces where the merge looks for them, programs level."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from quire.kernels.dispatch import device_on_triton

pytest.importorskip("triton")

from quire.kernels.attention.triton import latent_schedule

TILE = 64
BATCHES = [
    [1], [0, 5, 0, 64, 65], [32768], [1024] * 40, [8192] * 8, [200, 9000, 1, 64, 128, 3000, 777, 63],
    [1 + 37 * i % 500 for i in range(300)],
]  # fmt: skip


def ranges(pieces: latent_schedule.Pieces) -> list[list[tuple[int, ...]]]:
    """Of each program its pieces: place, row, seat, first token, end, pieces of the row."""
    items, programs = pieces.items.tolist(), []
    for place in pieces.heads.tolist():
        own: list[tuple[int, ...]] = []
        while place >= 0:
            row, seat, begin, end, more, count = items[place][:6]
            own.append((place, row, seat, begin, end, count))
            place = place + 1 if more else -1
        programs.append(own)
    return programs


@pytest.mark.parametrize("programs", [1, 13, 132])
@pytest.mark.parametrize("lens", BATCHES, ids=len)
def test_every_token_once(device: torch.device, lens: list[int], programs: int) -> None:
    if not device_on_triton(device):
        pytest.skip("a Triton kernel")
    seats = torch.arange(len(lens), dtype=torch.int32, device=device) + 3
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    pieces = latent_schedule.pieces(seats, seq_lens, programs, TILE, 2)
    dealt, places = ranges(pieces), pieces.places.tolist()
    of_row: dict[int, list[tuple[int, ...]]] = {row: [] for row in range(len(lens))}
    for place, row, seat, begin, end, count in (piece for own in dealt for piece in own):
        of_row[row].append((begin, end, place))
        assert (seat, count) == (row + 3, places[row][1])
    for row, found in of_row.items():
        found.sort()
        assert [place for _, _, place in found] == list(range(places[row][0], sum(places[row])))
        assert (found[0][0], found[-1][1]) == (0, lens[row])
        assert all(before[1] == after[0] for before, after in pairwise(found))
        assert all(begin % TILE == 0 and begin < end for begin, end, _ in found) or not lens[row]
    tiles = [sum(max(-(-(p[4] - p[3]) // TILE), 1) for p in own) for own in dealt]
    fair = -(-sum(tiles) // programs)
    assert max(tiles) <= max(fair + fair // 16, 2)


def test_rows_that_fill_the_programs_stay_whole(device: torch.device) -> None:
    if not device_on_triton(device):
        pytest.skip("a Triton kernel")
    seq_lens = torch.full((12,), 2048, dtype=torch.int32, device=device)
    pieces = latent_schedule.pieces(seq_lens, seq_lens, 12, TILE, 2)
    assert pieces.places[:, 1].tolist() == [1] * 12
    assert pieces.heads.tolist() == list(range(0, 24, 2))
    pieces = latent_schedule.pieces(seq_lens, seq_lens, 25, TILE, 2)
    assert pieces.places[:, 1].tolist() == [2] * 12
