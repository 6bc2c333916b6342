"""Kernels across ranks: alone, with what the others send put there beforehand; and as real processes that meet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from quire.distributed.peer_memory import Layout, PeerMemory
from quire.kernels.across_ranks import reduce_add_reference
from quire.kernels.dispatch import INTERPRETED
from quire.kernels.elementwise.norm import rms_norm_reference
from quire.kernels.sampling.apart import draw_apart, draw_apart_reference
from quire.kernels.sampling.draws import floats
from quire.kernels.sampling.state import Column, Stats
from quire.kernels.summands import Summands
from tests.effort import some
from tests.kernels.peers import make_peers
from tests.sampling.rows import columns

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1, see test_interpreted")
ROOT = Path(__file__).parents[2]


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The interpreter cuts bfloat16 off where devices round it."""
    torch.testing.assert_close(found, wanted, rtol=2**-7 if found.dtype == torch.bfloat16 else 0, atol=0)


def check_normed(found: torch.Tensor, of: torch.Tensor, gain: torch.Tensor) -> None:
    wanted = rms_norm_reference(of, gain, 1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-6 if found.dtype == torch.float32 else 2**-7, atol=1e-6)


def summands_of(
    rows: int, hidden: int, dtype: torch.dtype, generator: torch.Generator, *, all_there: bool = False
) -> tuple[Summands, torch.Tensor]:
    """Of two choices a row, or at most so many of three, and their sums."""
    parts = torch.randn(rows, 2 if all_there else 3, hidden, generator=generator).to(dtype)
    if all_there:
        return Summands(parts), parts.float().sum(1).to(dtype)
    experts = torch.full((rows, 3), -1, dtype=torch.int32)
    for row in range(rows):
        experts[row, torch.randperm(3, generator=generator)[: row % 3]] = 7
    there = parts.float() * (experts >= 0)[:, :, None]
    return Summands(parts, experts), there.sum(1).to(dtype)


def shown_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def assert_empty(peers: PeerMemory) -> None:
    assert all((peers.views[name] == -1).all() for name in ("once", "twice", "squares"))


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5])
def test_what_ranks_send_and_make_of_what_comes(
    tmp_path: Path, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.distributed import peer_memory
    from quire.kernels.triton import across_ranks

    monkeypatch.setattr(peer_memory, "PIECE", 40)  # words: a row in two pieces, or in three
    hidden = 96
    layout = Layout(3, hidden, dtype.itemsize, max_rows=8)
    ranks = make_peers(tmp_path / "memory", layout)
    for use in (0, 1, 2):
        partials = [torch.randn(rows, hidden).to(dtype) for _ in ranks]
        residual = torch.randn(rows, hidden).to(dtype)
        for source in (0, 2):
            ranks[1].views["once"][use & 1, source, :rows] = shown_bits(partials[source])
        wanted = reduce_add_reference(partials, residual)
        assert across_ranks.reduce_once(partials[1], residual, ranks[1]) is residual
        check(residual, wanted)
        assert_empty(ranks[1])
        for other in (0, 2):
            sent = ranks[other].views["once"][use & 1, 1, :rows]
            assert torch.equal(sent, shown_bits(partials[1]))
            sent.fill_(-1)
            assert_empty(ranks[other])


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_whole_rows_are_normed_where_pieces_were_added_up(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is added up are parts of some choices, in every second use."""
    from quire.distributed import peer_memory
    from quire.kernels.triton import across_ranks

    monkeypatch.setattr(peer_memory, "PIECE", 16)
    rows, hidden, generator = 6, 96, torch.Generator().manual_seed(1)
    ranks = make_peers(tmp_path / "memory", Layout(2, hidden, dtype.itemsize, max_rows=8))
    gain = torch.randn(hidden).to(dtype)
    for use in range(5):
        own, partial = summands_of(rows, hidden, dtype, generator, all_there=use == 3)
        theirs, residual = (torch.randn(rows, hidden).to(dtype) for _ in range(2))
        wanted = reduce_add_reference([theirs, partial], residual)
        ranks[1].views["once"][use & 1, 0, :rows] = shown_bits(theirs)
        given = own if use % 2 else partial
        made = across_ranks.reduce_once(given, residual, ranks[1], None if use == 2 else (gain, 1e-6))
        if use % 2 and dtype == torch.bfloat16:  # cut off twice
            torch.testing.assert_close(residual, wanted, rtol=2**-6, atol=2**-6)
        else:
            check(residual, wanted)
        if use == 2:
            assert made is residual
        else:
            check_normed(made, residual, gain)
        assert_empty(ranks[1])
        ranks[0].views["once"].fill_(-1)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_one_rank_adds_up(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows 1 and 5 that is this rank; of the others it sends its part and gets the sum."""
    from quire.distributed import peer_memory
    from quire.kernels.triton import across_ranks

    monkeypatch.setattr(peer_memory, "PIECE", 32)
    rows, hidden = 7, 80
    layout = Layout(4, hidden, dtype.itemsize, max_rows=8)
    ranks = make_peers(tmp_path / "memory", layout)
    for use in (0, 1, 2):
        partials = [torch.randn(rows, hidden).to(dtype) for _ in ranks]
        residual = torch.randn(rows, hidden).to(dtype)
        wanted = reduce_add_reference(partials, residual)
        mine = ranks[1].views["twice"][use & 1]
        for row in range(rows):
            for source in (0, 2, 3) if row % 4 == 1 else (row % 4,):
                place, sent = (source, partials[source]) if row % 4 == 1 else (4 + source, wanted)
                mine[place, row // 4] = shown_bits(sent[row])
        check(across_ranks.reduce_twice(partials[1], residual, ranks[1]), wanted)
        assert_empty(ranks[1])
        for row in range(rows):
            is_mine = row % 4 == 1
            for other in (0, 2, 3):
                if is_mine or other == row % 4:
                    found = ranks[other].views["twice"][use & 1, 5 if is_mine else 1, row // 4]
                    check(found.view(dtype), (residual if is_mine else partials[1])[row])
                    found.fill_(-1)
        for other in (0, 2, 3):
            assert_empty(ranks[other])


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pieces", [1, 3])
def test_what_a_norm_makes_of_rows_that_come(
    tmp_path: Path, dtype: torch.dtype, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, of which each needs to know the squares of all: where that is not their own rank's business, for here
    they run one after the other."""
    from quire.distributed import peer_memory
    from quire.kernels.triton import across_ranks

    hidden, rows = 72, 1 if pieces > 1 else 6
    words = hidden * dtype.itemsize // 4
    monkeypatch.setattr(peer_memory, "PIECE", -(-words // pieces))
    layout = Layout(4, hidden, dtype.itemsize, max_rows=8)
    assert layout.pieces == pieces
    width = -(-words // pieces // 16) * 16
    ranks, gain = make_peers(tmp_path / "memory", layout), torch.randn(hidden).to(dtype)
    for use in (0, 1, 2):
        partials = [torch.randn(rows, hidden).to(dtype) for _ in ranks]
        residual = torch.randn(rows, hidden).to(dtype)
        wanted = reduce_add_reference(partials, residual)
        squares = torch.stack(
            [piece.float().square().sum(1) for piece in wanted.split(width * 4 // dtype.itemsize, 1)], 1
        )
        mine, told = ranks[1].views["twice"][use & 1], ranks[1].views["squares"][use & 1]
        for row in range(rows):
            for source in (0, 2, 3) if row % 4 == 1 else (row % 4,):
                place, sent = (source, partials[source]) if row % 4 == 1 else (4 + source, wanted)
                mine[place, row // 4] = shown_bits(sent[row])
            if row % 4 != 1:
                told[row] = shown_bits(squares[row])
        normed = across_ranks.reduce_twice(partials[1], residual, ranks[1], (gain, 1e-6) if use else None)
        check(residual, wanted)
        if use:
            check_normed(normed, residual, gain)
            assert_empty(ranks[1])
            for row in {1, 5} & {*range(rows)}:
                for other in (0, 2, 3):
                    found = ranks[other].views["squares"][use & 1, row].view(torch.float32)
                    torch.testing.assert_close(
                        found, residual[row].float().square().sum()[None, None], rtol=1e-5, atol=0
                    )
        for peers in ranks:
            PeerMemory.clear(peers._local, layout)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_of_a_piece_are_added_in_the_order_of_ranks(dtype: torch.dtype) -> None:
    """What comes from others lies further apart than this rank's share is long."""
    from quire.kernels.triton import across_ranks

    hidden, room, rows = 48, 7, 5
    for size in (2, 3, 4):
        for rank in range(size):
            parts, own, residual = (torch.randn(count, hidden).to(dtype) for count in (size * room, rows, rows))
            each = [own if one == rank else parts[one * room : one * room + rows] for one in range(size)]
            wanted = reduce_add_reference(each, residual)
            across_ranks._add_parts_kernel[(2,)](
                own, parts, residual, rows * hidden, STRIDE=room * hidden, RANK=rank, SIZE=size, BLOCK=128
            )
            check(residual, wanted)


@needs_interpreter
@pytest.mark.parametrize("size", [2, 4])
def test_no_number_reads_as_an_empty_place(tmp_path: Path, size: int) -> None:
    """Not even the one whose bits are those of such a place."""
    from quire.kernels.triton import across_ranks

    layout = Layout(size, 64, 2, max_rows=8)
    ranks = make_peers(tmp_path / "memory", layout)
    nothing = torch.full((2, 64), -1, dtype=torch.int16).view(torch.bfloat16)
    residual = torch.zeros(2, 64, dtype=torch.bfloat16)
    for peers in ranks[1:]:
        ranks[0].views["once"][0, peers.topology.rank, :2] = 0
    across_ranks.reduce_once(nothing, residual, ranks[0])
    assert residual.isnan().all()
    assert not (ranks[1].views["once"][0, 0, :2] == -1).any()


@needs_interpreter
def test_tokens_and_logits_of_a_step(tmp_path: Path) -> None:
    from quire.kernels.triton import across_ranks

    vocab, width, rows = 5001, 2512, 3  # the second rank's part is narrower than it is wide
    layout = Layout(2, 64, 2, max_rows=8, vocab=vocab, logit_rows=4)
    first, second = make_peers(tmp_path / "memory", layout)
    for _ in range(2):
        parts = [torch.randn(rows, width) for _ in range(2)]
        for peers, part in ((second, parts[1]), (first, parts[0])):
            assert peers.logits is not None
            across_ranks.gather_columns(part, peers.logits[:rows], peers)
        assert first.logits is not None
        assert torch.equal(first.logits[:rows], torch.cat(parts, 1)[:, :vocab])
        tokens = torch.randint(0, vocab, (3,), dtype=torch.int32)
        others = torch.zeros_like(tokens)
        across_ranks.from_first(tokens, first)
        across_ranks.from_first(others, second)
        assert torch.equal(others, tokens)


def test_ranks_share_memory_of_their_own_logits_and_gather_them_there(tmp_path: Path) -> None:
    layout = Layout(2, 64, 2, max_rows=8, vocab=5001, logit_rows=4)
    peers = make_peers(tmp_path / "memory", layout)[0]
    assert peers.logits is not None
    assert peers.logits.shape == (4, 5001)
    assert peers.logits.stride() == (5024, 1)


@needs_interpreter
def test_logits_that_lie_where_they_belong(tmp_path: Path) -> None:
    from quire.kernels.triton import across_ranks

    layout = Layout(2, 64, 2, max_rows=8, vocab=5001, logit_rows=4)
    first, second = make_peers(tmp_path / "memory", layout)
    assert first.logits is not None
    assert second.logits is not None
    whole, room = torch.randn(3, 5001), first.topology.padded(5001).room
    first.logits[:3, :room] = whole[:, :room]
    second.logits[:3, : 5001 - room] = whole[:, room:]
    for peers in (second, first):
        assert peers.logits is not None
        across_ranks.gather_columns(peers.logits[:3, :room], peers.logits[:3], peers)
    assert torch.equal(first.logits[:3], whole)


def marked(values: torch.Tensor, use: int) -> torch.Tensor:
    return values.view(torch.int32).long() & 0xFFFFFFFF | use << 32


@needs_interpreter
@pytest.mark.parametrize(("vocab", "size"), [(10007, 3), (5, 4)])
def test_tokens_that_ranks_draw_from_their_parts(tmp_path: Path, vocab: int, size: int) -> None:
    """By rank 1, to which the others have told what they know."""
    layout = Layout(size, 64, 2, max_rows=8, vocab=vocab, logit_rows=8)
    ranks = make_peers(tmp_path / "memory", layout)
    shares = [peers.topology.padded(vocab) for peers in ranks]
    matrix = columns([{"temperature": t, "seed": seed} for seed, t in enumerate((1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 2.0))])
    seats = torch.tensor([1, 2, 3, 0, 4, 5, 6, 7], dtype=torch.int32)
    sharpness = floats(matrix[seats.long()], Column.INV_TEMPERATURE)
    stats = Stats.allocate(8, shares[0].room, torch.device("cpu"))
    owners, generator = set(), torch.Generator().manual_seed(7)
    for use in (1, 2, 3):
        whole = torch.randn(8, vocab, generator=generator) * 2
        whole[1, :2] = whole[1].amax()  # the first of equals
        whole[4] = -torch.inf
        whole[5, 1] = torch.nan
        parts = [whole[:, share.begin : share.end] for share in shares]
        lengths = torch.arange(use, use + 8, dtype=torch.int32)
        wanted = draw_apart_reference(parts, matrix, seats, lengths)
        mine, live = ranks[1].views, (seats > 0).nonzero()[:, 0]
        for source in {*range(size)} - {1}:
            clean = parts[source].nan_to_num(-torch.inf, neginf=-torch.inf)
            clean = clean if clean.shape[1] else torch.full((8, 1), -torch.inf)
            top = clean.amax(-1)
            mass = torch.where(top > -torch.inf, ((clean - top[:, None]) * sharpness[:, None]).exp().sum(-1), 0)
            token = (clean.argmax(-1) + shares[source].begin).int()
            told = torch.where(sharpness > 0, mass.view(torch.int32), token)
            mine["masses"][use & 1, source, live] = torch.stack([marked(top, use), marked(told, use)], 1)[live]
        ours = (wanted >= shares[1].begin) & (wanted < shares[1].end) & (sharpness > 0)
        owners |= set(ours.tolist())
        mine["drawn"][use & 1, ~ours] = marked(wanted.int(), use)[~ours]
        part, out = torch.full((8, shares[1].room), 100.0), torch.full((8,), -1, dtype=torch.int32)
        part[:, : parts[1].shape[1]] = parts[1]
        draw_apart(part, matrix, seats, lengths, out, stats, ranks[1])
        assert out.tolist() == wanted.tolist()
        for peers in ranks:
            assert torch.equal(peers.views["masses"][use & 1, 1, live], mine["masses"][use & 1, 1, live])
            assert (peers.views["masses"][use & 1, 1, live] >> 32 == use).all()
            assert torch.equal(peers.views["drawn"][use & 1, ours], marked(wanted.int(), use)[ours])
    assert owners == {False, True}


def test_the_reference_draws_what_one_rank_does() -> None:
    from quire.kernels.sampling.sampling import sample

    matrix = columns([{"temperature": seed % 3 / 2, "seed": seed} for seed in range(300)])
    seats, lengths = torch.arange(300, dtype=torch.int32), torch.arange(300, dtype=torch.int32) % 7
    whole = torch.randn(300, 5003, generator=torch.Generator().manual_seed(3)) * 3
    found = torch.empty(300, dtype=torch.int32)
    sample(whole, matrix, seats, lengths, found, None, filtered=False)
    apart = draw_apart_reference(list(whole.split(1680, 1)), matrix, seats, lengths)
    assert (apart != found).sum() <= 1  # a sum that rounds the other way


MEET = """
import sys
from pathlib import Path
import torch
from quire.distributed import peer_memory
from quire.kernels.triton import across_ranks
from quire.kernels.across_ranks import reduce_add_reference
from quire.kernels.elementwise.norm import rms_norm_reference
from quire.kernels.sampling.apart import draw_apart, draw_apart_reference
from quire.kernels.sampling.state import Stats
from tests.kernels.peers import peers_in
from tests.kernels.test_across_ranks import summands_of
from tests.sampling.rows import columns

rank, folder, size, steps = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
peer_memory.FEW_BYTES = 512
width = 128 // size
peer_memory.PIECE = 24 if size == 2 else 64
layout = peer_memory.Layout(size, 64, 2, max_rows=8, vocab=100, logit_rows=8, drafts=50)
peers = peers_in(folder / "memory", layout, rank)
generator = torch.Generator().manual_seed(5)
shares = [type(peers.topology)(number, size).padded(100) for number in range(size)]
matrix = columns([{"temperature": seat % 3, "seed": seat} for seat in range(8)])
stats = Stats.allocate(8, shares[0].room, torch.device("cpu"))
for step in range(steps):
    rows = 1 + 5 * step % 8
    if step % 3:
        drafts = torch.arange(50, dtype=torch.int32) * step if rank == 0 else torch.zeros(50, dtype=torch.int32)
        assert across_ranks.from_first(drafts, peers, "drafts").tolist() == list(range(0, 50 * step, step)), step
    made = [summands_of(rows, 64, torch.float16, generator) for _ in range(size)]
    partials = [partial for _, partial in made]
    residual = torch.randn(rows, 64, generator=generator).half()
    wanted = reduce_add_reference(partials, residual)
    mine = made[rank][step % 3 == 0]
    sums = across_ranks.reduce_once if rows <= layout.once_rows else across_ranks.reduce_twice
    if step % 2:
        normed = sums(mine, residual, peers, (torch.ones(64).half(), 1e-6))
        torch.testing.assert_close(normed, rms_norm_reference(wanted, torch.ones(64), 1e-6), rtol=2**-9, atol=1e-6)
    else:
        sums(mine, residual, peers)
    assert torch.equal(residual, wanted), step
    parts = [torch.randn(rows, width, generator=generator) for _ in range(size)]
    across_ranks.gather_columns(parts[rank], peers.logits[:rows], peers)
    if rank == 0:
        assert torch.equal(peers.logits[:rows], torch.cat(parts, 1)[:, :100]), step
    whole = torch.randn(rows, 100, generator=generator)
    seats, lengths = torch.arange(rows, dtype=torch.int32) + step % 2, torch.full((rows,), step, dtype=torch.int32)
    own, drawn = torch.zeros(rows, shares[0].room), torch.zeros(rows, dtype=torch.int32)
    parts = [whole[:, share.begin:share.end] for share in shares]
    own[:, :parts[rank].shape[1]] = parts[rank]
    draw_apart(own, matrix, seats, lengths, drawn, stats, peers)
    assert drawn.tolist() == draw_apart_reference(parts, matrix, seats, lengths).tolist(), step
    tokens = torch.arange(rows, dtype=torch.int32) + step if rank == 0 else torch.zeros(rows, dtype=torch.int32)
    assert across_ranks.from_first(tokens, peers).tolist() == list(range(step, step + rows)), step
print("met")
"""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_meet_through_the_kernels(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.distributed import peer_memory

    monkeypatch.setattr(peer_memory, "FEW_BYTES", 512)
    make_peers(tmp_path / "memory", Layout(size, 64, 2, max_rows=8, vocab=100, logit_rows=8, drafts=50))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET, str(rank), str(tmp_path), str(size), str(some(24, 2))],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        ends = [rank.communicate(timeout=500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [out for out, _ in ends] == ["met\n"] * size, ends
