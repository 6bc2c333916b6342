"""Attention of one query token a row over the paged cache: flash decoding with split KV.

A program serves all query heads of one KV head (so K and V are read once) over one share of the row's tokens.
The number of shares follows from the batch size alone; where a share begins is decided on the device from the row's
length. The program that finishes a row's head last merges the shares by log-sum-exp (Dao et al., Flash-Decoding,
2023): a counter a row and KV head, set back to zero by the one who merges, tells who that is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import dot_width, has_pdl, next_power_of_2, num_processors

MAX_SPLITS = 32
LOG2_E = 1.4426950408889634


@triton.jit
def _merge(
    partial_ptr, lse_ptr, out_ptr, first_line, shares, num_splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The shares of one KV head's queries weighed together, CHUNK of them fetched at once."""
    member = tl.arange(0, BLOCK_GROUP)
    column = tl.arange(0, BLOCK_DIM)
    top = tl.full([BLOCK_GROUP], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for base in range(0, shares, CHUNK):
        share = base + tl.arange(0, CHUNK)
        line = (first_line + member)[None, :] * num_splits + share[:, None]  # [shares, heads]
        alive = (share < shares)[:, None] & (member < GROUP)[None, :]
        # Not through the L1 cache: other processors wrote this a moment ago.
        lse = tl.load(lse_ptr + line, alive, -1.0e30, cache_modifier=".cg")
        at = partial_ptr + line[:, :, None] * DIM + column[None, None, :]
        part = tl.load(at, alive[:, :, None] & (column < DIM)[None, None, :], 0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top[None, :])
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        top = new_top
    out = out_ptr + (first_line + member)[:, None] * DIM + column[None, :]
    mask = (member < GROUP)[:, None] & (column < DIM)[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize_on_alignment=["lse_ptr", "counter_ptr", "seats_ptr", "seq_lens_ptr"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, counter_ptr, seats_ptr, table_ptr, seq_lens_ptr,
    q_stride, table_stride, block_stride, head_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_splits = tl.num_programs(0)
    member = tl.arange(0, BLOCK_M)  # query heads of this KV head
    token = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_DIM)
    seq_len = tl.load(seq_lens_ptr + row)
    table = table_ptr + tl.load(seats_ptr + row).to(tl.int64) * table_stride

    # Shares are whole tiles; a row of few tiles has fewer shares than there are programs.
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N
    tiles = tl.cdiv(seq_len, BLOCK_N) - first
    tiles_a_share = tl.cdiv(tiles, num_splits)
    begin = (first + split * tiles_a_share) * BLOCK_N
    end = tl.minimum(begin + tiles_a_share * BLOCK_N, seq_len)
    position = begin + token
    block = tl.load(table + position // BLOCK_SIZE, position < end, 0)
    if PDL:  # what is read above was written before the predecessor started
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if begin >= end:
        return
    shares = tl.cdiv(tiles, tiles_a_share)

    head = kv_head * GROUP + member
    mask = (member < GROUP)[:, None] & (column < DIM)[None, :]
    q = tl.load(q_ptr + row * q_stride + head[:, None] * DIM + column[None, :], mask, 0.0)  # [heads, dim]
    k_head, v_head = k_ptr + kv_head.to(tl.int64) * head_stride, v_ptr + kv_head.to(tl.int64) * head_stride
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)  # finite: a wholly masked tile must not make NaN
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    inner = ((token % BLOCK_SIZE) * DIM)[:, None] + column[None, :]  # place within a block
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + token
        inside = (position < end)[:, None] & (column < DIM)[None, :]
        if BLOCK_SIZE > BLOCK_N:
            inner = ((position % BLOCK_SIZE) * DIM)[:, None] + column[None, :]
        at = (block.to(tl.int64) * block_stride)[:, None] + inner
        ahead = position + BLOCK_N  # the next tile's blocks are looked up while this tile is on its way
        block = tl.load(table + ahead // BLOCK_SIZE, ahead < end, 0)
        k = tl.load(k_head + at, inside, 0.0)  # [tokens, dim]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = position < end
        if WINDOW > 0:
            seen = seen & (position >= seq_len - WINDOW)
        s = tl.where(seen[None, :], s, -1.0e30)
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        v = tl.load(v_head + at, inside, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top

    acc = acc / total[:, None]
    if shares == 1:
        out = out_ptr + (row * HEADS + head[:, None]) * DIM + column[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask)
        return
    line = (row * HEADS + head) * num_splits + split
    tl.store(partial_ptr + line[:, None] * DIM + column[None, :], acc, mask)
    tl.store(lse_ptr + line, top + tl.log2(total), member < GROUP)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    counter = counter_ptr + row * (HEADS // GROUP) + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == shares - 1:
        tl.store(counter, 0)
        _merge(
            partial_ptr, lse_ptr, out_ptr, row * HEADS + kv_head * GROUP, shares, num_splits, GROUP, DIM,
            BLOCK_GROUP, BLOCK_DIM, CHUNK,
        )  # fmt: skip


def num_splits(num_rows: int, num_kv_heads: int, processors: int) -> int:
    """Shares a row's tokens are cut into: a power of two that gives every processor about two programs."""
    wanted = 2 * processors // (num_rows * num_kv_heads)
    return min(next_power_of_2(wanted + 1) // 2, MAX_SPLITS) if wanted > 1 else 1


def workspace_elements(max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, processors: int) -> int:
    """float32 elements for `decode` of any number of rows up to `max_rows`: partial results, then counters."""
    lines = max(rows * num_splits(rows, num_kv_heads, processors) for rows in range(1, max_rows + 1))
    return lines * num_heads * (head_dim + 1) + max_rows * num_kv_heads


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seats: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    workspace: torch.Tensor,
    sliding_window: int = 0,
    out: torch.Tensor | None = None,
    splits: int = 0,
    tile: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """See `quire.kernels.paged_attention`; `splits` and `tile` (tokens, warps, stages) are for measuring."""
    num_rows, num_heads, dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    if out is None:
        out = torch.empty((num_rows, num_heads * dim), dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    splits = splits or num_splits(num_rows, num_kv_heads, num_processors(q.device))
    lines, counters = num_rows * num_heads * splits, num_rows * num_kv_heads
    if workspace.numel() < lines * (dim + 1) + counters:
        raise ValueError(f"decode of {num_rows} rows needs {lines * (dim + 1) + counters} workspace elements, "
                         f"got {workspace.numel()}")  # fmt: skip
    group = num_heads // num_kv_heads
    block_group = next_power_of_2(group)
    # A K tile of 8 KiB and few warps: several programs fit a processor and hide each other's latency.
    block_n, num_warps, num_stages = tile or (
        max(8192 // (dot_width(dim) * q.element_size()), 16), 2 if block_group <= 16 else 4, 4
    )  # fmt: skip
    pdl = has_pdl(q.device)
    _decode_kernel[(splits, num_kv_heads, num_rows)](
        q, k_cache, v_cache, out, workspace, workspace[lines * dim :], workspace.view(torch.int32)[-counters:],
        seats, block_table, seq_lens, q.stride(0), block_table.stride(0), k_cache.stride(0), k_cache.stride(1),
        scale * LOG2_E, HEADS=num_heads, GROUP=group, DIM=dim, BLOCK_SIZE=block_size, WINDOW=sliding_window,
        BLOCK_M=max(block_group, 16), BLOCK_N=block_n, BLOCK_GROUP=block_group, BLOCK_DIM=dot_width(dim),
        CHUNK=max(32 // block_group, 1), STAGES=num_stages, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        PDL=pdl, num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
