"""Latent rows of several requests out of the paged cache, one behind the other, in the type of queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import cdiv, has_pdl, next_power_of_2

TOKENS = 16  # of a program


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_counters"],
    do_not_specialize_on_alignment=["seats_ptr", "starts_ptr", "seq_lens_ptr"],
)
def _gather_rows_kernel(
    cache_ptr, out_ptr, seats_ptr, table_ptr, starts_ptr, seq_lens_ptr, counters_ptr, num_rows, num_tokens,
    num_counters, table_stride, block_stride,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.zeros([TOKENS], tl.int32) - 1
    for base in range(0, num_rows, ROWS):
        other = base + tl.arange(0, ROWS)
        start = tl.load(starts_ptr + other, other < num_rows, 2147483647)
        row += tl.sum((start[None, :] <= line[:, None]).to(tl.int32), axis=1)
    position = line - tl.load(starts_ptr + row)
    there = (line < num_tokens) & (position < tl.load(seq_lens_ptr + row))
    seat = tl.load(seats_ptr + row).to(tl.int64)
    block = tl.load(table_ptr + seat * table_stride + position // BLOCK_SIZE, there, 0).to(tl.int64)
    if PDL:  # what is read above is the step's own
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    at = (block * block_stride + position % BLOCK_SIZE * WIDTH)[:, None] + column
    x = tl.load(cache_ptr + at, there[:, None] & (column < WIDTH), 0.0).to(out_ptr.dtype.element_ty)
    to = out_ptr + line.to(tl.int64)[:, None] * WIDTH + column
    tl.store(to, x, (line < num_tokens)[:, None] & (column < WIDTH))  # zeros behind the last row
    if tl.program_id(0) == 0:
        for counter in range(num_counters):
            tl.store(counters_ptr + counter, 0)


def gather_rows(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seats: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    counters: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `quire.kernels.attention.latent_expanded`."""
    pdl, (num_tokens, width) = has_pdl(cache.device), out.shape
    _gather_rows_kernel[(cdiv(num_tokens, TOKENS),)](
        cache, out, seats, block_table, starts, seq_lens, counters, len(seats), num_tokens, len(counters),
        block_table.stride(0), cache.stride(0), WIDTH=width, BLOCK_SIZE=cache.shape[2], TOKENS=TOKENS,
        BLOCK_WIDTH=next_power_of_2(width), ROWS=64, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
