"""Kernels across ranks: alone, with what the others send put there beforehand; and as real processes that meet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from quire.distributed.peer_memory import Layout
from quire.kernels.across_ranks import reduce_add_reference
from quire.kernels.dispatch import INTERPRETED
from tests.effort import some
from tests.kernels.peers import peers_in

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1, see test_interpreted")
ROOT = Path(__file__).parents[2]


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The interpreter cuts bfloat16 off where devices round it."""
    torch.testing.assert_close(found, wanted, rtol=2**-7 if found.dtype == torch.bfloat16 else 0, atol=0)


def shown_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5])
def test_what_few_rows_send_and_make_of_what_comes(tmp_path: Path, dtype: torch.dtype, rows: int) -> None:
    from quire.kernels.triton import across_ranks

    hidden = 96
    layout = Layout(3, hidden, dtype.itemsize, max_rows=8)
    ranks = [peers_in(tmp_path / "memory", layout, rank) for rank in range(3)]
    for use in (1, 2, 3):
        partials = [torch.randn(rows, hidden).to(dtype) for _ in ranks]
        residual = torch.randn(rows, hidden).to(dtype)
        for source in (0, 2):
            words = shown_bits(partials[source]).long() & 0xFFFFFFFF | use << 32
            ranks[1].views["few"][use & 1, source, :rows] = words
        wanted = reduce_add_reference(partials, residual)
        found = across_ranks.reduce_few(partials[1], residual, ranks[1])
        assert found is residual
        check(found, wanted)
        for other in (0, 2):
            sent = ranks[other].views["few"][use & 1, 1, :rows]
            assert torch.equal(sent.int(), shown_bits(partials[1]))
            assert (sent >> 32 == use).all()


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_many_rows_send_and_make_of_what_comes(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.distributed import peer_memory
    from quire.kernels.triton import across_ranks

    monkeypatch.setattr(peer_memory, "FEW_BYTES", 512)
    rows, hidden = 7, 80
    layout = Layout(2, hidden, dtype.itemsize, max_rows=8)
    assert layout.few_rows < rows <= layout.many_rows
    ranks = [peers_in(tmp_path / "memory", layout, rank) for rank in range(2)]
    for use in (1, 2, 3):
        partials = [torch.randn(rows, hidden).to(dtype) for _ in ranks]
        residual = torch.randn(rows, hidden).to(dtype)
        ranks[1].views["many"][use & 1, 0, :rows] = shown_bits(partials[0])
        ranks[1].views["many_here"][use & 1, 0, :rows] = use
        wanted = reduce_add_reference(partials, residual)
        check(across_ranks.reduce_many(partials[1], residual, ranks[1]), wanted)
        assert torch.equal(ranks[0].views["many"][use & 1, 1, :rows], shown_bits(partials[1]))
        assert (ranks[0].views["many_here"][use & 1, 1, :rows] == use).all()


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_one_rank_adds_up(tmp_path: Path, dtype: torch.dtype) -> None:
    """Of rows 1 and 5 that is this rank; of the others it sends its part and gets the sum."""
    from quire.kernels.triton import across_ranks

    rows, hidden = 7, 80
    layout = Layout(4, hidden, dtype.itemsize, max_rows=8)
    ranks = [peers_in(tmp_path / "memory", layout, rank) for rank in range(4)]
    for use in (1, 2, 3):
        partials = [torch.randn(rows, hidden).to(dtype) for _ in ranks]
        residual = torch.randn(rows, hidden).to(dtype)
        wanted = reduce_add_reference(partials, residual)
        mine, here = ranks[1].views["many"][use & 1], ranks[1].views["many_here"][use & 1]
        for row in range(rows):
            for source in (0, 2, 3) if row % 4 == 1 else (row % 4,):
                place, sent = (source, partials[source]) if row % 4 == 1 else (4 + source, wanted)
                mine[place, row // 4], here[place, row // 4] = shown_bits(sent[row]), use
        check(across_ranks.reduce_many(partials[1], residual, ranks[1]), wanted)
        for row in range(rows):
            is_mine = row % 4 == 1
            for other in (0, 2, 3):
                came = ranks[other].views["many_here"][use & 1, 5 if is_mine else 1, row // 4] == use
                assert came or not (is_mine or other == row % 4)
                if is_mine or other == row % 4:
                    found = ranks[other].views["many"][use & 1, 5 if is_mine else 1, row // 4].view(dtype)
                    check(found, (residual if is_mine else partials[1])[row])


@needs_interpreter
def test_tokens_and_logits_of_a_step(tmp_path: Path) -> None:
    from quire.kernels.triton import across_ranks

    vocab, width, rows = 5001, 2512, 3  # the second rank's part is narrower than it is wide
    layout = Layout(2, 64, 2, max_rows=8, vocab=vocab, logit_rows=4)
    first, second = (peers_in(tmp_path / "memory", layout, rank) for rank in range(2))
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


MEET = """
import sys
from pathlib import Path
import torch
from quire.distributed import peer_memory
from quire.kernels.triton import across_ranks
from quire.kernels.across_ranks import reduce_add_reference
from tests.kernels.peers import peers_in

rank, folder, size, steps = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
peer_memory.FEW_BYTES = 512 if size < 4 else 1024
width = 128 // size
layout = peer_memory.Layout(size, 64, 2, max_rows=8, vocab=100, logit_rows=8, drafts=50)
peers = peers_in(folder / "memory", layout, rank)
generator = torch.Generator().manual_seed(5)
for step in range(steps):
    rows = 1 + 5 * step % 8
    if step % 3:
        drafts = torch.arange(50, dtype=torch.int32) * step if rank == 0 else torch.zeros(50, dtype=torch.int32)
        assert across_ranks.from_first(drafts, peers, "drafts").tolist() == list(range(0, 50 * step, step)), step
    partials = [torch.randn(rows, 64, generator=generator).half() for _ in range(size)]
    residual = torch.randn(rows, 64, generator=generator).half()
    wanted = reduce_add_reference(partials, residual)
    mine = partials[rank]
    if rows <= layout.few_rows:
        found = across_ranks.reduce_few(mine, residual, peers)
    else:
        found = across_ranks.reduce_many(mine, residual, peers)
    assert torch.equal(found, wanted), step
    parts = [torch.randn(rows, width, generator=generator) for _ in range(size)]
    across_ranks.gather_columns(parts[rank], peers.logits[:rows], peers)
    if rank == 0:
        assert torch.equal(peers.logits[:rows], torch.cat(parts, 1)[:, :100]), step
    tokens = torch.arange(rows, dtype=torch.int32) + step if rank == 0 else torch.zeros(rows, dtype=torch.int32)
    assert across_ranks.from_first(tokens, peers).tolist() == list(range(step, step + rows)), step
print("met")
"""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_meet_through_the_kernels(size: int, tmp_path: Path) -> None:
    (tmp_path / "memory").touch()
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
