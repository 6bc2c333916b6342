"""Attention of one query token a row over the paged cache: flash decoding with split KV.

A program serves all query heads of one KV head (so K and V are read once) over one share of the row's tokens.
The number of shares follows from the batch size alone; where a share begins is decided on the device from the row's
length. With more than one share a second kernel merges them by log-sum-exp (Dao et al., Flash-Decoding, 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl, next_power_of_2, num_processors

MAX_SPLITS = 32
LOG2_E = 1.4426950408889634


@triton.jit
def _share(seq_len, split, num_splits, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Tokens [begin, end) of share `split`, and how many shares hold any. Shares are whole tiles of BLOCK_N."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N
    tiles = tl.cdiv(seq_len, BLOCK_N) - first
    tiles_a_share = tl.cdiv(tiles, num_splits)
    begin = (first + split * tiles_a_share) * BLOCK_N
    end = tl.minimum(begin + tiles_a_share * BLOCK_N, seq_len)
    return begin, end, tl.cdiv(tiles, tl.maximum(tiles_a_share, 1))


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, seats_ptr, table_ptr, seq_lens_ptr,
    q_stride, table_stride, k_block_stride, k_head_stride, v_block_stride, v_head_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_splits = tl.num_programs(0)
    member = tl.arange(0, BLOCK_M)  # query heads of this KV head
    token = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_DIM)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seq_len = tl.load(seq_lens_ptr + row)
    begin, end, shares = _share(seq_len, split, num_splits, BLOCK_N, WINDOW)
    if begin >= end:
        return
    table = table_ptr + tl.load(seats_ptr + row).to(tl.int64) * table_stride
    head = kv_head * GROUP + member
    q_mask = (member < GROUP)[:, None] & (column < DIM)[None, :]
    q = tl.load(q_ptr + row * q_stride + head[:, None] * DIM + column[None, :], q_mask, 0.0)  # [heads, dim]
    k_head = k_ptr + kv_head.to(tl.int64) * k_head_stride
    v_head = v_ptr + kv_head.to(tl.int64) * v_head_stride

    top = tl.full([BLOCK_M], -1.0e30, tl.float32)  # finite: a wholly masked tile must not make NaN
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    position = begin + token
    block = tl.load(table + position // BLOCK_SIZE, position < end, 0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + token
        inside = (position < end)[:, None]
        if BLOCK_DIM != DIM:
            inside = inside & (column < DIM)[None, :]
        inner = ((position % BLOCK_SIZE) * DIM)[:, None] + column[None, :]
        wide = block.to(tl.int64)[:, None]
        ahead = position + BLOCK_N  # the next tile's blocks are looked up while this tile is on its way
        block = tl.load(table + ahead // BLOCK_SIZE, ahead < end, 0)
        k = tl.load(k_head + wide * k_block_stride + inner, inside, 0.0)  # [tokens, dim]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = position < end
        if WINDOW > 0:
            seen = seen & (position >= seq_len - WINDOW)
        s = tl.where(seen[None, :], s, -1.0e30)
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        v = tl.load(v_head + wide * v_block_stride + inner, inside, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top

    acc = acc / total[:, None]
    if shares == 1:
        out = out_ptr + (row * HEADS + head[:, None]) * DIM + column[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), q_mask)
    else:
        line = (row * HEADS + head) * num_splits + split
        tl.store(partial_ptr + line[:, None] * DIM + column[None, :], acc, q_mask)
        tl.store(lse_ptr + line, top + tl.log2(total), member < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial_ptr, lse_ptr, out_ptr, seq_lens_ptr, num_splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    column = tl.arange(0, BLOCK_DIM)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _, _, shares = _share(tl.load(seq_lens_ptr + row), 0, num_splits, BLOCK_N, WINDOW)
    if shares > 1:  # else the first kernel has written the output itself
        line = (row * HEADS + head) * num_splits + split
        mask = (split < shares)[:, None] & (column < DIM)[None, :]
        partial = tl.load(partial_ptr + line[:, None] * DIM + column[None, :], mask, 0.0)  # [splits, dim]
        lse = tl.load(lse_ptr + line, split < shares, float("-inf"))
        weight = tl.exp2(lse - tl.max(lse, axis=0))
        merged = tl.sum(partial * weight[:, None], axis=0) / tl.sum(weight, axis=0)
        out = out_ptr + (row * HEADS + head) * DIM + column
        tl.store(out, merged.to(out_ptr.dtype.element_ty), column < DIM)


def num_splits(num_rows: int, num_kv_heads: int, processors: int) -> int:
    """Shares a row's tokens are cut into: a power of two that gives every processor a few programs."""
    wanted = 4 * processors // (num_rows * num_kv_heads)
    return min(next_power_of_2(wanted + 1) // 2, MAX_SPLITS) if wanted > 1 else 1


def workspace_elements(max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, processors: int) -> int:
    """float32 elements that `decode` may need for any number of rows up to `max_rows`."""
    lines = max(rows * num_splits(rows, num_kv_heads, processors) for rows in range(1, max_rows + 1))
    return lines * num_heads * (head_dim + 1)


def tile(head_dim: int, element_size: int) -> int:
    """Tokens a tile: what keeps a K or V tile at 16 KiB."""
    return max(8192 * 2 // (next_power_of_2(head_dim) * element_size), 16)


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
    block_n: int = 0,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """See `quire.kernels.paged_attention`; the last four arguments are for measuring."""
    num_rows, num_heads, dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    if out is None:
        out = torch.empty((num_rows, num_heads * dim), dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    splits = splits or num_splits(num_rows, num_kv_heads, num_processors(q.device))
    lines = num_rows * num_heads * splits
    if splits > 1 and workspace.numel() < lines * (dim + 1):
        raise ValueError(f"workspace has {workspace.numel()} elements, {num_rows} rows need {lines * (dim + 1)}")
    partial, lse = workspace, workspace[lines * dim :]
    group = num_heads // num_kv_heads
    block_n = block_n or tile(dim, q.element_size())
    pdl = has_pdl(q.device)
    _decode_kernel[(splits, num_kv_heads, num_rows)](
        q, k_cache, v_cache, out, partial, lse, seats, block_table, seq_lens,
        q.stride(0), block_table.stride(0), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        scale * LOG2_E, HEADS=num_heads, GROUP=group, DIM=dim, BLOCK_SIZE=block_size, WINDOW=sliding_window,
        BLOCK_M=max(next_power_of_2(group), 16), BLOCK_N=block_n, BLOCK_DIM=next_power_of_2(dim), STAGES=num_stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", PDL=pdl, num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(num_heads, num_rows)](
            partial, lse, out, seq_lens, splits, HEADS=num_heads, DIM=dim, WINDOW=sliding_window, BLOCK_N=block_n,
            BLOCK_DIM=next_power_of_2(dim), BLOCK_SPLITS=MAX_SPLITS, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out
