"""Triton twins of `sampling/sampling.py`: `_chunk_stats` reads the logits once, then one program a row draws."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.sampling.state import CHUNK, GROUP, SHORTLIST, Column, Scratch, Stats
from quire.kernels.sampling.triton.draw import draw_from_row, greedy, load_chunks, load_float, load_logits, uniform
from quire.kernels.sampling.triton.filter import pick_filtered

_WIDTH = tl.constexpr(len(Column))
_INV_TEMPERATURE = tl.constexpr(int(Column.INV_TEMPERATURE))
_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32

_STATS_WARPS, _PICK_WARPS, _FILTER_WARPS = 4, 8, 8
_TILE = 1024  # tokens of a short list that are looked at together
_PASS = 2048  # tokens of a row that are looked at together where all of it is read
_STAGES = 4  # such tiles that are on their way
_PARTS = 8  # that such a reading cuts the range of the sought logit into

# Slices of a batch start anywhere: their alignment must not choose another compiled kernel.
_ANYWHERE = ["seats", "lengths", "out"]


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _chunk_stats(
    logits,
    columns,
    seats,
    chunk_max,
    chunk_min,
    chunk_argmax,
    chunk_sum,
    group_max,
    group_sum,
    stride,
    vocab,
    chunks,
    groups,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits + row * stride, tokens, vocab)  # first: nothing here has to be waited for
    seat = tl.load(seats + row)
    inv_temperature = load_float(columns + seat * _WIDTH + _INV_TEMPERATURE)
    if seat == 0:
        return
    top = tl.max(x, 0)
    tl.store(chunk_max + row * chunks + chunk, top)
    if inv_temperature > 0:
        weights = tl.exp((x - tl.maximum(top, -_LARGEST)) * inv_temperature)
        tl.store(chunk_sum + row * chunks + chunk, tl.sum(weights, 0))
        if FILTERED:
            group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
            there = group < groups
            maxima = tl.max(tl.reshape(x, [CHUNK // GROUP, GROUP]), 1)
            sums = tl.sum(tl.reshape(weights, [CHUNK // GROUP, GROUP]), 1)
            tl.store(group_max + row * groups + group, maxima, mask=there)
            tl.store(group_sum + row * groups + group, sums, mask=there)
            tl.store(chunk_min + row * chunks + chunk, tl.min(tl.where(x > -_INF, x, _INF), 0))
    else:
        tl.store(chunk_argmax + row * chunks + chunk, tl.min(tl.where(x == top, tokens, 2147483647), 0))


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _pick(
    logits,
    columns,
    seats,
    lengths,
    chunk_max,
    chunk_argmax,
    chunk_sum,
    out,
    stride,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    column = columns + seat * _WIDTH
    inv_temperature = load_float(column + _INV_TEMPERATURE)
    token = 0
    if seat != 0:
        if inv_temperature > 0:
            top, masses = load_chunks(row, chunks, chunk_max, chunk_sum, inv_temperature, CHUNKS)
            u = uniform(column, tl.load(lengths + row))
            token = draw_from_row(logits + row * stride, vocab, masses, top, inv_temperature, -_INF, u, CHUNKS, CHUNK)
        else:
            token = greedy(row, chunks, chunk_max, chunk_argmax, CHUNKS)
    tl.store(out + row, token)


def chunk_stats(logits: torch.Tensor, columns: torch.Tensor, seats: torch.Tensor, stats: Stats) -> None:
    """What an unfiltered draw needs to know of each chunk."""
    (rows, vocab), chunks = logits.shape, stats.chunk_max.shape[1]
    unused = stats.chunk_sum
    _chunk_stats[(chunks, rows)](
        logits, columns, seats, stats.chunk_max, unused, stats.chunk_argmax, stats.chunk_sum, unused, unused,
        logits.stride(0), vocab, chunks, 0, FILTERED=False, CHUNK=CHUNK, GROUP=GROUP, num_warps=_STATS_WARPS,
    )  # fmt: skip


def sample(
    logits: torch.Tensor,
    columns: torch.Tensor,
    seats: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scratch: Scratch,
    *,
    filtered: bool,
) -> None:
    rows, vocab = logits.shape
    chunks, groups = scratch.chunk_max.shape[1], scratch.group_max.shape[1]
    _chunk_stats[(chunks, rows)](
        logits,
        columns,
        seats,
        scratch.chunk_max,
        scratch.chunk_min,
        scratch.chunk_argmax,
        scratch.chunk_sum,
        scratch.group_max,
        scratch.group_sum,
        logits.stride(0),
        vocab,
        chunks,
        groups,
        FILTERED=filtered,
        CHUNK=CHUNK,
        GROUP=GROUP,
        num_warps=_STATS_WARPS,
    )
    if filtered:
        pick_filtered[(rows,)](
            logits,
            columns,
            seats,
            lengths,
            scratch.chunk_max,
            scratch.chunk_min,
            scratch.chunk_argmax,
            scratch.chunk_sum,
            scratch.group_max,
            scratch.group_sum,
            scratch.short_groups,
            scratch.short_logits,
            scratch.short_ids,
            out,
            logits.stride(0),
            vocab,
            chunks,
            groups,
            CHUNKS=triton.next_power_of_2(chunks),
            GROUPS=triton.next_power_of_2(groups),
            CHUNK=CHUNK,
            GROUP=GROUP,
            SHORTLIST=SHORTLIST,
            TILE=_TILE,
            PASS=_PASS,
            PARTS=_PARTS,
            STAGES=_STAGES,
            num_warps=_FILTER_WARPS,
        )
    else:
        _pick[(rows,)](
            logits,
            columns,
            seats,
            lengths,
            scratch.chunk_max,
            scratch.chunk_argmax,
            scratch.chunk_sum,
            out,
            logits.stride(0),
            vocab,
            chunks,
            CHUNKS=triton.next_power_of_2(chunks),
            CHUNK=CHUNK,
            num_warps=_PICK_WARPS,
        )
