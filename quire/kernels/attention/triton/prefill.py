"""Causal attention of rows with many query tokens over the paged cache (Dao, FlashAttention-2, 2023).

Where `prefill_sm90` has a kernel for the case, that one runs; this one takes all cases.

A tile of BLOCK_M lines holds BLOCK_M // GROUP consecutive tokens of one row, each with all query heads of one KV
head. Row i's tiles start at `query_start[i] // TOKENS + i`: an increasing function of i that leaves room for every
row's last, partial tile, so the grid's size needs only host numbers and each program finds its row by counting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.scores import PerHead, Scores
from quire.kernels.attention.triton import prefill_schedule
from quire.kernels.attention.triton.operand import (
    LOG2_E,
    cap,
    first_seen,
    in_log2,
    pointers,
    query_operand,
    softcapped,
)
from quire.kernels.triton.launch import dot_width, has_gluon_sm90, has_pdl, next_power_of_2, num_processors


@triton.jit
def _find_row(
    query_start_ptr, origin, tile, num_rows, LINES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The last row whose tiles start at or before `tile`: of TILE lines, of which each query token has LINES."""
    found = 0
    for base in range(0, num_rows, ROWS):
        row = base + tl.arange(0, ROWS)
        start = tl.load(query_start_ptr + row, row < num_rows, 0) - origin
        found += tl.sum(((start * LINES // TILE + row <= tile) & (row < num_rows)).to(tl.int32), axis=0)
    return found - 1


@triton.jit
def _attend(
    acc, top, total, q, table, k_head, v_head, begin, end, query_position, seen_from, seq_len, block_stride, scale,
    slope, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, CHUNKED: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """One online-softmax pass over tokens [begin, end), begin a multiple of BLOCK_N; scores are in units of log 2.

    What lies before `seen_from`, with a window, may have been given back, and be anything by now.
    """
    token = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_DIM)
    in_dim = (column < DIM)[None, :]
    inner = ((token % BLOCK_SIZE) * DIM)[:, None] + column[None, :]  # place within a block
    position = begin + token
    block = tl.load(table + position // BLOCK_SIZE, position < seq_len, 0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + token
        if BLOCK_SIZE > BLOCK_N:
            inner = ((position % BLOCK_SIZE) * DIM)[:, None] + column[None, :]
        at = (block.to(tl.int64) * block_stride)[:, None] + inner
        # The next tile's blocks are looked up while this tile is on its way.
        more = (position + BLOCK_N < seq_len) if MASKED else (start + BLOCK_N < end)
        block = tl.load(table + (position + BLOCK_N) // BLOCK_SIZE, more, 0)
        if MASKED:
            there = position < seq_len
            if WINDOW > 0:
                there = there & (position >= seen_from)
            inside = there[:, None] & in_dim
            k, v = tl.load(k_head + at, inside, 0.0), tl.load(v_head + at, inside, 0.0)
        elif BLOCK_DIM != DIM:
            k, v = tl.load(k_head + at, in_dim, 0.0), tl.load(v_head + at, in_dim, 0.0)
        else:
            k, v = tl.load(k_head + at), tl.load(v_head + at)
        k, v = k.to(q.dtype), v.to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [lines, tokens]
        if SOFTCAP > 0:
            s = softcapped(s * scale, SOFTCAP) / scale
        if SLOPES:
            s += slope[:, None] * (position[None, :] - query_position[:, None]).to(tl.float32) / scale
        if MASKED:
            seen = position[None, :] <= query_position[:, None]
            if WINDOW > 0:
                seen = seen & (position[None, :] >= first_seen(query_position, WINDOW, CHUNKED)[:, None])
            # Finite, so that a wholly masked line makes no NaN; after scaling, because a fused multiply-add of this
            # value and its rounded negative leaves an error that exp2 turns into infinity.
            s = tl.where(seen, s * scale, -1.0e30)
            new_top = tl.maximum(top, tl.max(s, axis=1))
            p = tl.exp2(s - new_top[:, None])
        else:
            new_top = tl.maximum(top, tl.max(s, axis=1) * scale)
            p = tl.exp2(s * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seats_ptr", "query_start_ptr", "seq_lens_ptr"]
)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seats_ptr, table_ptr, query_start_ptr, seq_lens_ptr, sinks_ptr, slopes_ptr, num_rows,
    q_stride, table_stride, block_stride, head_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, SOFTCAP: tl.constexpr, CHUNKED: tl.constexpr, SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tokens first: they have the most to read
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_DIM)
    origin = tl.load(query_start_ptr)  # token of q's first line
    row = _find_row(query_start_ptr, origin, tile, num_rows, 1, TOKENS, 256)
    row_start = tl.load(query_start_ptr + row) - origin
    query_len = tl.load(query_start_ptr + row + 1) - origin - row_start
    first = (tile - row_start // TOKENS - row) * TOKENS  # the tile's first token within the row
    seq_len = tl.load(seq_lens_ptr + row)
    table = table_ptr + tl.load(seats_ptr + row).to(tl.int64) * table_stride
    if PDL:  # what is read above is the step's own input
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if first >= query_len:
        return
    k_head = k_ptr + kv_head.to(tl.int64) * head_stride
    v_head = v_ptr + kv_head.to(tl.int64) * head_stride

    query = first + line // GROUP
    head = kv_head * GROUP + line % GROUP
    alive = (line < TOKENS * GROUP) & (query < query_len)
    q_mask = alive[:, None] & (column < DIM)[None, :]
    query_token = (row_start + query).to(tl.int64)
    q = tl.load(q_ptr + (query_token * q_stride + head * DIM)[:, None] + column[None, :], q_mask, 0.0)
    q = query_operand(q, k_ptr)

    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # a score without a value
        top = tl.where(alive, in_log2(tl.load(sinks_ptr + head, alive, 0.0)), -1.0e30)
        total = tl.where(alive, 1.0, 0.0)
    slope = 0.0
    if SLOPES:
        slope = in_log2(tl.load(slopes_ptr + head, alive, 0.0))
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    context = seq_len - query_len  # tokens before this step's
    query_position = context + query
    end = tl.minimum(context + first + TOKENS, seq_len)
    begin, seen_from = 0, 0
    diagonal = (context + first + 1) // BLOCK_N * BLOCK_N  # tiles before it are seen by every line
    if WINDOW > 0:
        seen_from = first_seen(context + first, WINDOW, CHUNKED)
        begin = seen_from // BLOCK_N * BLOCK_N
        diagonal = begin
    acc, top, total = _attend(
        acc, top, total, q, table, k_head, v_head, begin, diagonal, query_position, seen_from, seq_len, block_stride,
        scale, slope, DIM, BLOCK_SIZE, WINDOW, False, BLOCK_N, BLOCK_DIM, STAGES, PRECISION, SOFTCAP, CHUNKED, SLOPES,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, table, k_head, v_head, diagonal, end, query_position, seen_from, seq_len, block_stride,
        scale, slope, DIM, BLOCK_SIZE, WINDOW, True, BLOCK_N, BLOCK_DIM, STAGES, PRECISION, SOFTCAP, CHUNKED, SLOPES,
    )  # fmt: skip
    out = out_ptr + (query_token * HEADS + head)[:, None] * DIM + column[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), q_mask)


def shape(head_dim: int, element_size: int, lines: int, programs: float) -> tuple[int, int, int, int]:
    """(lines, tokens, warps, stages) of a tile, as measured on an H200.

    Large tiles read K and V less often; small ones waste less at the diagonal and fill the device sooner. `lines`:
    query tokens times heads a KV head, of the longest row; `programs`: large tiles a processor would get.
    """
    if element_size == 4:
        return 64, 32, 8, 2
    small = lines <= 128 or programs < 1.5
    if next_power_of_2(head_dim) > 128:
        return (64, 32, 4, 3) if small else (128, 64, 8, 2)
    return (64, 64, 4, 3) if small else (256, 64, 16, 3)


def schedule(
    seats: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    kv_dtype: torch.dtype,
    is_far: bool,
) -> torch.Tensor | None:
    """What `prefill_sm90` works through, if it runs for such rows; None: the kernel of this file does."""
    if not has_gluon_sm90(seats.device):
        return None
    # With less work than that it is no faster, and takes the host longer to launch.
    if num_tokens * num_heads < 256 * num_processors(seats.device) and not is_far:
        return None
    from quire.kernels.attention.triton import prefill_sm90

    if not prefill_sm90.takes(kv_dtype, num_heads, num_kv_heads, head_dim, block_size):
        return None
    tokens = prefill_sm90.tokens(num_heads // num_kv_heads)
    return prefill_schedule.tiles(seats, query_start, seq_lens, num_tokens, max_query_len, tokens)


def wave(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, kv_dtype: torch.dtype, device: torch.device
) -> int:
    """Query tokens of one row that give every processor one item of `prefill_sm90`; 0 where that does not run."""
    if not has_gluon_sm90(device):
        return 0
    from quire.kernels.attention.triton import prefill_sm90

    if not prefill_sm90.takes(kv_dtype, num_heads, num_kv_heads, head_dim, block_size):
        return 0
    return num_processors(device) // num_kv_heads * prefill_sm90.tokens(num_heads // num_kv_heads)


def prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seats: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    scores: Scores,
    heads: PerHead,
    listed: torch.Tensor | None,
    out: torch.Tensor | None = None,
    tiles: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """See `quire.kernels.attention.paged`; `listed` is what `schedule` returned, `tiles` is for measuring."""
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    num_rows, group = len(seats), num_heads // num_kv_heads
    if out is None:
        out = torch.empty((num_tokens, num_heads * dim), dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    if listed is not None:
        from quire.kernels.attention.triton import prefill_sm90

        prefill_sm90.prefill(q, k_cache, v_cache, block_table, listed, max_query_len, scale, scores.window, out)
        return out
    programs = num_tokens * num_heads / 256 / num_processors(q.device)
    block_m, block_n, num_warps, num_stages = tiles or shape(dim, q.element_size(), max_query_len * group, programs)
    block_m = max(block_m, next_power_of_2(group))
    pdl = has_pdl(q.device)
    sinks, slopes = pointers(scores, heads, q)
    _prefill_kernel[(num_kv_heads, num_tokens // (block_m // group) + num_rows)](
        q, k_cache, v_cache, out, seats, block_table, query_start, seq_lens, sinks, slopes, num_rows,
        q.stride(0), block_table.stride(0), k_cache.stride(0), k_cache.stride(1), scale * LOG2_E,
        HEADS=num_heads, GROUP=group, DIM=dim, BLOCK_SIZE=block_size, WINDOW=scores.window,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_DIM=dot_width(dim), STAGES=num_stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", PDL=pdl, SOFTCAP=cap(scores.softcap),
        CHUNKED=scores.chunked, SINKS=scores.sinks, SLOPES=scores.slopes, num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
