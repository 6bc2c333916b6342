"""Draws of rows whose logits lie in parts on several ranks; see `kernels.sampling.apart`.

A program a row. Words travel with the number of the row's use beside them, as in `kernels/triton/across_ranks.py`.
Who waits here has told all others before; and who tells of a use has heard of the one before it from all, so even and
odd uses have places of their own and nothing else keeps ranks apart.

Whose token it is follows from the same words on every rank, by the same code: nothing that differs between ranks may
choose another compiled kernel, so these numbers are not specialized.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.distributed.peer_memory import PeerMemory
from quire.kernels.sampling.state import CHUNK, Column, Stats
from quire.kernels.sampling.triton.draw import draw, greedy, load_float, load_logits, uniform
from quire.kernels.sampling.triton.sampling import chunk_stats
from quire.kernels.triton.across_ranks import address, arrived, marked
from quire.kernels.triton.launch import has_pdl, next_power_of_2

_WIDTH = tl.constexpr(len(Column))
_INV_TEMPERATURE = tl.constexpr(int(Column.INV_TEMPERATURE))
_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def _relative(sums, maxima, top, inv_temperature):
    """Masses, each relative to its own maximum, relative to `top` instead."""
    return tl.where(maxima > -_INF, sums * tl.exp((maxima - top) * inv_temperature), 0.0)


@triton.jit(
    do_not_specialize=["columns_here", "first", "rank"], do_not_specialize_on_alignment=["seats", "lengths", "out"]
)
def _draw_apart_kernel(
    part, columns, seats, lengths, chunk_max, chunk_argmax, chunk_sum, out, masses_ptr, drawn_ptr, uses_ptr,
    stride, chunks, columns_here, first, rank,
    SIZE: tl.constexpr, SOURCES: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seat = tl.load(seats + row)
    column = columns + seat * _WIDTH
    inv_temperature = load_float(column + _INV_TEMPERATURE)
    token = 0
    if seat != 0:
        use = tl.load(uses_ptr + row) + 1
        tl.debug_barrier()  # every thread has read it
        turn = (use & 1).to(tl.int64)
        chunk = tl.arange(0, CHUNKS)
        maxima = tl.load(chunk_max + row * chunks + chunk, chunk < chunks, -_INF)
        top = tl.max(maxima, 0)
        sums = tl.zeros([CHUNKS], tl.float32)
        if inv_temperature > 0:
            sums = tl.load(chunk_sum + row * chunks + chunk, chunk < chunks, 0.0)
            mass = tl.sum(_relative(sums, maxima, tl.maximum(top, -_LARGEST), inv_temperature), 0)
            word = mass.to(tl.int32, bitcast=True)
        else:
            word = greedy(row, chunks, chunk_max, chunk_argmax, CHUNKS) + first
        place = ((turn * SIZE + rank) * ROWS + row) * 2
        for peer in tl.static_range(SIZE):
            theirs = address(masses_ptr + peer, tl.int64)
            tl.store(theirs + place, marked(top.to(tl.int32, bitcast=True), use))
            tl.store(theirs + place + 1, marked(word, use))

        source = tl.arange(0, SOURCES)
        there = source < SIZE
        here = address(masses_ptr + rank, tl.int64) + ((turn * SIZE + source) * ROWS + row) * 2
        tops = tl.where(there, arrived(here, there, use).to(tl.float32, bitcast=True), -_INF)
        words = arrived(here + 1, there, use)
        best = tl.max(tops, 0)
        if inv_temperature > 0:
            best = tl.maximum(best, -_LARGEST)
            shares = _relative(words.to(tl.float32, bitcast=True), tops, best, inv_temperature)
            u = uniform(column, tl.load(lengths + row))
            owner, rest = draw(shares, source, u * tl.sum(shares, 0))
            if owner == rank:
                number, rest = draw(_relative(sums, maxima, best, inv_temperature), chunk, rest)
                at = number * CHUNK + tl.arange(0, CHUNK)
                x = load_logits(part + row * stride, at, columns_here)
                token, _ = draw(tl.exp((x - best) * inv_temperature), at, rest)
                token += first
                for peer in tl.static_range(SIZE):
                    tl.store(address(drawn_ptr + peer, tl.int64) + turn * ROWS + row, marked(token, use))
            else:
                waiting = address(drawn_ptr + rank, tl.int64) + turn * ROWS + row
                got = tl.load(waiting, volatile=True)
                while (got >> 32).to(tl.int32) != use:
                    got = tl.load(waiting, volatile=True)
                token = got.to(tl.int32)
        else:
            owner = tl.min(tl.where(there & (tops == best), source, SIZE), 0)
            token = tl.sum(tl.where(source == owner, words, 0), 0)
        tl.store(uses_ptr + row, use)
    tl.store(out + row, token)


def draw_apart(
    part: torch.Tensor,
    columns: torch.Tensor,
    seats: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    stats: Stats,
    peers: PeerMemory,
) -> None:
    """See `quire.kernels.sampling.apart`."""
    topology, layout, pdl = peers.topology, peers.layout, has_pdl(part.device)
    share, chunks = topology.padded(layout.vocab), stats.chunk_max.shape[1]
    columns_here = share.end - share.begin
    chunk_stats(part[:, :columns_here], columns, seats, stats)
    _draw_apart_kernel[(len(part),)](
        part, columns, seats, lengths, stats.chunk_max, stats.chunk_argmax, stats.chunk_sum, out, peers.bases["masses"],
        peers.bases["drawn"], peers.uses["masses"], part.stride(0), chunks, columns_here, share.begin, topology.rank,
        SIZE=topology.size, SOURCES=next_power_of_2(topology.size), ROWS=layout.logit_rows,
        CHUNKS=next_power_of_2(chunks), CHUNK=CHUNK, PDL=pdl, launch_pdl=pdl, num_warps=8,
    )  # fmt: skip
