"""Attention both ways within each of many prompts that lie one behind the other (Dao, FlashAttention-2, 2023).

A tile holds BLOCK_M consecutive tokens of one prompt and one query head. Tiles find their prompts as those of `prefill`
do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.triton.decode import LOG2_E
from quire.kernels.attention.triton.prefill import _find_row
from quire.kernels.triton.launch import dot_width


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["query_start_ptr", "num_keys_ptr"])
def _prompt_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, query_start_ptr, num_keys_ptr, num_rows, q_stride, kv_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, SOME_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = _find_row(query_start_ptr, 0, tile, num_rows, 1, BLOCK_M, 256)
    row_start = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - row_start
    first = (tile - row_start // BLOCK_M - row) * BLOCK_M
    if first >= length:
        return
    column = tl.arange(0, BLOCK_DIM)
    in_dim = (column < DIM)[None, :]
    query = first + tl.arange(0, BLOCK_M)
    token = tl.arange(0, BLOCK_N)
    at_query = (row_start + query).to(tl.int64)[:, None]
    q_mask = (query < length)[:, None] & in_dim
    q = tl.load(q_ptr + at_query * q_stride + head * DIM + column[None, :], q_mask, 0.0)
    k_column = head // (HEADS // KV_HEADS) * DIM + column[None, :]
    end = length
    if SOME_KEYS:
        end = tl.load(num_keys_ptr + row)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(end, first + BLOCK_M - 1 + WINDOW)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + token
        inside = (position < end)[:, None] & in_dim
        at = (row_start + position).to(tl.int64)[:, None] * kv_stride + k_column
        k = tl.load(k_ptr + at, inside, 0.0)
        v = tl.load(v_ptr + at, inside, 0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # in units of log 2
        seen = (position < end)[None, :]
        if WINDOW:  # what a query sees nothing of counts as nothing as soon as it sees something
            distance = query[:, None] - position[None, :]
            seen = seen & (distance < WINDOW) & (distance > -WINDOW)
        s = tl.where(seen, s, -1.0e30)
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    total = tl.where(total == 0, 1.0, total)  # of a query that sees nothing
    out = out_ptr + (at_query * HEADS + head) * DIM + column[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), q_mask)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    num_rows: int,
    max_len: int,
    scale: float,
    out: torch.Tensor,
    *,
    window: int = 0,
    num_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `quire.kernels.attention.prompt`."""
    (tokens, num_heads, dim), num_kv_heads = q.shape, k.shape[1]
    wide = q.element_size() == 4
    block_m = 32 if max_len <= 32 else 64
    block_n = 32 if wide or max_len <= 32 else 64
    _prompt_kernel[(num_heads, tokens // block_m + num_rows)](
        q, k, v, out, query_start, query_start if num_keys is None else num_keys, num_rows, q.stride(0), k.stride(0),
        scale * LOG2_E,
        HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=dim, WINDOW=window if window < max_len else 0,
        SOME_KEYS=num_keys is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_DIM=dot_width(dim),
        STAGES=2, PRECISION="ieee" if wide else "tf32", num_warps=4,
    )  # fmt: skip
    return out
