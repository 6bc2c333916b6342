"""One rank on a GPU of its own: sums, logits and tokens against what they must be, eagerly and in graphs.

python -m tests.distributed.gpu_ranks RANK SIZE MEETING OUT
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from quire.distributed.group import Group
from quire.distributed.peer_memory import Layout
from quire.distributed.sums_under_way import LEAST_OPERATIONS, Steps
from quire.kernels.across_ranks import (
    from_first,
    gather_columns,
    parts_adder,
    reduce_add,
    reduce_add_norm,
    reduce_add_reference,
)
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.sampling.apart import draw_apart
from quire.kernels.sampling.draws import floats, uniform
from quire.kernels.sampling.sampling import sample
from quire.kernels.sampling.state import Column, Scratch, Stats
from quire.kernels.summands import Summands
from quire.platforms import select_platform
from quire.types.ranks import Rank
from tests.sampling.rows import columns

HIDDEN, VOCAB, DRAFTS = 4096, 10007, 1560
ROWS = (1, 2, 7, 31, 32, 33, 100, 513, 2048, 5000)
LONG = (5000, 610, 777, 2048, 4999)  # steps whose sums are under way
VOCABS = (10007, 128256, 128249, 50)  # to draw from
STEPS = 50  # of a graph, so that every place is used again and again


def check_sums(group: Group, dtype: torch.dtype, hidden: int = HIDDEN) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows in ROWS:
        parts = [torch.randn(rows, hidden, generator=generator).to(dtype) for _ in range(group.topology.size)]
        residual = torch.randn(rows, hidden, generator=generator).to(dtype)
        wanted = reduce_add_reference(parts, residual)
        for _ in range(3):
            ours = reduce_add(parts[group.topology.rank].to(group.device), residual.to(group.device), group).cpu()
            if group.peers is not None and (rows <= group.peers.layout.once_rows or group.topology.size != 3):
                assert torch.equal(ours, wanted), (rows, dtype)
            torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=6e-2)
        found.append(ours)
        gain = torch.randn(hidden, generator=generator).to(group.device, dtype)
        choices = some_summands(rows, hidden, dtype, generator, group)
        halves = Summands(choices.parts[:, :2].contiguous())
        for partial in (parts[group.topology.rank].to(group.device), choices, halves):
            theirs, plain = residual.to(group.device), residual.to(group.device)
            whole = partial.clone() if isinstance(partial, torch.Tensor) else partial.sum()
            normed = reduce_add_norm(partial, theirs, (gain, 1e-5), group)
            reduce_add(whole, plain, group)
            assert torch.equal(theirs, plain)
            found.append(theirs.cpu())
            assert (normed is not None) == norms_inside(group, rows, hidden)
            if normed is not None:
                torch.testing.assert_close(normed, rms_norm(theirs, gain, 1e-5), rtol=2**-7, atol=1e-6)
                found.append(normed.cpu())
    return found


def some_summands(rows: int, hidden: int, dtype: torch.dtype, generator: torch.Generator, group: Group) -> Summands:
    """Two of three choices a row at most, of which the order makes no difference."""
    size, rank, device = group.topology.size, group.topology.rank, group.device
    parts = [torch.randn(rows, 3, hidden, generator=generator).to(dtype) for _ in range(size)]
    experts = torch.randint(-1, 9, (size, rows, 3), generator=generator, dtype=torch.int32)
    experts[:, :, 1] = -1
    return Summands(parts[rank].to(device), experts[rank].to(device))


def norms_inside(group: Group, rows: int, hidden: int) -> bool:
    """Of 16-bit numbers."""
    if group.peers is None or rows <= 16:
        return False
    layout = group.peers.layout
    return rows <= layout.twice_rows if rows > layout.once_rows else hidden <= 2048


def check_under_way(group: Group, dtype: torch.dtype) -> list[torch.Tensor]:
    """Chains of products whose sums are under way while the next piece is multiplied, against the same pieces one after
    the other: they have the same bits. Ranks are slowed down in turns."""
    rank, size, device = group.topology.rank, group.topology.size, group.device
    steps = Steps(size, HIDDEN, dtype, max(LONG), int(LEAST_OPERATIONS / 300))
    group.share_memory(Layout(size, HIDDEN, 2, max_rows=max(LONG)), (steps, parts_adder))
    sums, found = group.under_way, []
    assert sums is not None
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(HIDDEN, HIDDEN, generator=generator) / 100 for _ in range(size)]
    weight, whole = weights[rank].to(device, dtype), torch.randn(max(LONG), HIDDEN, generator=generator)
    for round_, rows in enumerate(LONG * 3):
        start = whole[:rows].to(device, dtype)
        assert sums.takes(start)
        held, plain = sums.hold(start), start.clone()
        for number in range(6):
            if (round_ + number) % size == rank:
                torch.cuda._sleep(1_000_000)
            for tokens, piece in sums.pieces(held):
                reduce_add(torch.tanh(piece) @ weight, piece, group)
                assert len(plain[tokens]) == len(piece) < rows
        found.append(sums.finish(held).cpu())
        group.under_way = None
        for _ in range(6):
            for piece in sums.cut(plain):
                reduce_add(torch.tanh(piece) @ weight, piece, group)
        group.under_way = sums
        assert torch.equal(found[-1], plain.cpu()), (rows, dtype)
    assert not sums.takes(whole[:500].to(device, dtype)), "too few"
    group.under_way = None
    return found


def captured(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    body()
    graph.capture_end()
    return graph


def check_graph(group: Group, rows: int) -> torch.Tensor:
    """What is drafted, a chain of sums, the logits of its end and the tokens of these, replayed: as long computed with
    plain tensors."""
    rank, size, device = group.topology.rank, group.topology.size, group.device
    weights = torch.randn(size, HIDDEN, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    mine, start = weights[rank].to(device), torch.ones(rows, HIDDEN, dtype=torch.bfloat16)
    residual = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
    width = -(-VOCAB // size)
    assert group.peers is not None
    assert group.peers.logits is not None
    logits, tokens = group.peers.logits[:rows], torch.zeros(rows, dtype=torch.int32, device=device)
    counter = torch.zeros(1, dtype=torch.float32, device=device)
    drafts = torch.zeros(DRAFTS, dtype=torch.int32, device=device)

    gain = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device), 1e-5

    def step() -> None:
        drafts.copy_(counter.int().expand(DRAFTS) + 1 if rank == 0 else torch.zeros_like(drafts))
        from_first(drafts, group, "drafts")
        residual.fill_(1)
        for number in range(8):
            if number % 3:
                reduce_add(residual * mine / 64, residual, group)
            else:
                reduce_add_norm(residual * mine / 64, residual, gain, group)
        counter.add_(1)
        part = (residual[:, :1].float() + counter) * torch.arange(rank * width, (rank + 1) * width, device=device)
        gather_columns(part, logits, group)
        if rank == 0:
            tokens.copy_(logits.argmax(1).int() + counter.int())
        else:
            tokens.zero_()
        from_first(tokens, group)

    graph = captured(step)
    wanted = start
    for _ in range(8):
        wanted = reduce_add_reference([wanted * weight / 64 for weight in weights], wanted)
    for _ in range(STEPS):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(residual.cpu(), wanted)
    state, count = wanted[:, :1].float() + counter.cpu(), int(counter)
    assert count == STEPS + 1
    assert drafts.tolist() == [count] * DRAFTS
    if rank == 0:
        torch.testing.assert_close(logits.cpu(), state * torch.arange(VOCAB))
    best = torch.where(state[:, 0] > 0, VOCAB - 1, 0)
    assert tokens.tolist() == (best + count).tolist()
    return residual.cpu()


def assert_drawn(logits: torch.Tensor, column: torch.Tensor, length: int, token: int) -> None:
    """That the row's uniform is the token's, up to rounding of sums in float32."""
    weights = ((logits - logits.max()).double() * floats(column[None], Column.INV_TEMPERATURE)).exp()
    running = torch.nn.functional.pad(weights.cumsum(0) / weights.sum(), (1, 0))
    key = column[None, [Column.KEY_LOW, Column.KEY_HIGH]]
    u = float(uniform(key[:, 0], key[:, 1], torch.full_like(key[:, 0], length)))
    assert float(running[token]) - 2e-6 < u < float(running[token + 1]) + 2e-6, (length, token)


def check_draws(group: Group, vocab: int, rows: int) -> torch.Tensor:
    """Tokens that ranks draw from their parts, eagerly and in graphs, against those of the first rank's whole logits,
    which are brought together from where the parts lie. A seed has the same token but where a sum rounds otherwise."""
    peers, device = group.peers, group.device
    assert peers is not None
    assert peers.logits is not None
    share, logits = peers.topology.padded(vocab), peers.logits[:rows]
    whole = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(device) * 4
    temperatures = (1.0, 0.0, 0.7, 1.3)
    every = columns([{"seed": seed, "temperature": temperatures[seed % 4]} for seed in range(rows)]).to(device)
    seats = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    seats[5::7] = 0
    lengths, out = torch.zeros(rows, dtype=torch.int32, device=device), torch.zeros_like(seats)
    found = torch.zeros(STEPS + 1, rows, dtype=torch.int32, device=device)
    part, stats = logits[:, : share.room], Stats.allocate(rows, share.room, device)
    part[:, : share.end - share.begin] = whole[:, share.begin : share.end]

    def step() -> None:
        draw_apart(part, every, seats, lengths, out, stats, peers)
        found.scatter_(0, lengths.long().unsqueeze(0), out.unsqueeze(0))
        lengths.add_(1)

    graph = captured(step)
    for _ in range(STEPS):
        graph.replay()
    gather_columns(part, logits, group)
    if group.topology.rank == 0:
        assert torch.equal(logits, whole)
        scratch, others = Scratch.allocate(rows, 1, vocab, device), 0
        for length in range(STEPS + 1):
            sample(whole, every, seats, lengths.fill_(length), out, scratch, filtered=False)
            assert torch.equal(found[length, 1::4], out[1::4]), "greedy rows"
            for row in (found[length] != out).nonzero()[:, 0].tolist():
                assert_drawn(whole[row], every[seats[row]], length, int(found[length, row]))
                others += 1
        print("draws", vocab, rows, "others", others, flush=True)
        assert others <= 3 + rows * STEPS // 100
    return found.cpu()


def main(rank: str, size: str, meeting: str, out: str) -> None:
    me = Rank(int(rank), int(size), meeting)
    group = Group(me, select_platform("cuda").set_up(None, me))
    alone = check_sums(group, torch.bfloat16)  # by the library
    group.share_memory(Layout(me.size, HIDDEN, 2, max_rows=8192, vocab=VOCAB, logit_rows=640, drafts=DRAFTS))
    assert group.peers is not None, "GPUs of one host could not write each other's memory"
    found = [*alone, *check_sums(group, torch.bfloat16), *check_sums(group, torch.float16)]
    group.share_memory(Layout(me.size, 2048, 2, max_rows=8192))
    found += check_sums(group, torch.bfloat16, hidden=2048)
    group.share_memory(Layout(me.size, HIDDEN, 2, max_rows=8192, vocab=VOCAB, logit_rows=640, drafts=DRAFTS))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found += [check_graph(group, rows) for rows in (1, 8, 40, 600)]
        stream.synchronize()
        for dtype in (torch.bfloat16, torch.float16):
            found += check_under_way(group, dtype)
        for vocab in VOCABS:
            group.share_memory(Layout(me.size, HIDDEN, 2, max_rows=64, vocab=vocab, logit_rows=320))
            found += [check_draws(group, vocab, rows) for rows in (1, 17, 300)]
        stream.synchronize()
    assert group.smallest(int(rank) + 3) == [3]
    torch.save(found, f"{out}{rank}")
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
