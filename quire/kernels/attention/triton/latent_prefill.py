"""Causal attention of rows with many query tokens over latent rows, in tiles that lie on their side (`latent_decode`).

A row's lines are its (query, head) pairs, query after query, and a program takes 64 neighbours of them: one query's
heads in halves, or a few queries. All but the last tiles of tokens are seen by every line. Row i's tiles start at
`lines before it // LINES + i`, so the grid's size needs only host numbers and each program finds its row by counting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.triton.latent_decode import attend, queries, shape
from quire.kernels.attention.triton.operand import LOG2_E, query_operand
from quire.kernels.attention.triton.prefill import _find_row
from quire.kernels.triton.launch import dot_width, has_pdl, shared_bytes


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seats_ptr", "query_start_ptr", "seq_lens_ptr"]
)
def _latent_prefill_kernel(
    q_ptr, cache_ptr, out_ptr, seats_ptr, table_ptr, query_start_ptr, seq_lens_ptr, num_rows, table_stride,
    block_stride, scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tokens first: they have the most to read
    origin = tl.load(query_start_ptr)  # token of q's first line
    row = _find_row(query_start_ptr, origin, tile, num_rows, HEADS, BLOCK_L, 256)
    row_start = tl.load(query_start_ptr + row) - origin
    query_len = tl.load(query_start_ptr + row + 1) - origin - row_start
    first = (tile - row_start * HEADS // BLOCK_L - row) * BLOCK_L  # the tile's first line within the row
    seq_len = tl.load(seq_lens_ptr + row)
    table = table_ptr + tl.load(seats_ptr + row).to(tl.int64) * table_stride
    if PDL:  # what is read above is the step's own input
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if first >= query_len * HEADS:
        return
    own = first + tl.arange(0, BLOCK_L)
    there = own < query_len * HEADS
    line = row_start.to(tl.int64) * HEADS + own
    q, q_rope = queries(q_ptr, line * (RANK + ROPE), there, RANK, ROPE, BLOCK_RANK, BLOCK_ROPE)
    q, q_rope = query_operand(q, cache_ptr), query_operand(q_rope, cache_ptr)
    last = seq_len - query_len + own // HEADS  # each query's own token
    end = tl.minimum(seq_len - query_len + (first + BLOCK_L - 1) // HEADS + 1, seq_len)
    top = tl.full([BLOCK_L], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_L], tl.float32)
    acc = tl.zeros([BLOCK_RANK, BLOCK_L], tl.float32)
    acc, top, total = attend(
        acc, top, total, q, q_rope, table, cache_ptr, 0, end, last, block_stride, scale, RANK, ROPE, BLOCK_SIZE,
        BLOCK_N, BLOCK_RANK, BLOCK_ROPE, STAGES,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_RANK)
    acc = tl.trans(acc / total[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + line[:, None] * RANK + column[None, :], acc, there[:, None] & (column < RANK)[None, :])


def prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    block_table: torch.Tensor,
    seats: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `quire.kernels.attention.latent_paged`."""
    num_tokens, num_heads, width = q.shape
    if not len(seats):
        return out
    cut = shape(max_query_len * num_heads, width, shared_bytes(q.device))
    pdl = has_pdl(q.device)
    _latent_prefill_kernel[(num_tokens * num_heads // cut.lines + len(seats),)](
        q, cache, out, seats, block_table, query_start, seq_lens, len(seats), block_table.stride(0), cache.stride(0),
        scale * LOG2_E, HEADS=num_heads, RANK=rank, ROPE=width - rank, BLOCK_SIZE=cache.shape[2], BLOCK_L=cut.lines,
        BLOCK_N=cut.tokens, BLOCK_RANK=dot_width(rank), BLOCK_ROPE=dot_width(width - rank), STAGES=cut.stages, PDL=pdl,
        num_warps=cut.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
