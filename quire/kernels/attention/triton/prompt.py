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


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["query_start_ptr"])
def _prompt_kernel(
    qkv_ptr, out_ptr, query_start_ptr, num_rows, stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
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
    q = tl.load(qkv_ptr + at_query * stride + head * DIM + column[None, :], q_mask, 0.0)
    k_column = (HEADS + head // (HEADS // KV_HEADS)) * DIM + column[None, :]
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    for begin in tl.range(0, length, BLOCK_N, num_stages=STAGES):
        position = begin + token
        inside = (position < length)[:, None] & in_dim
        at = (row_start + position).to(tl.int64)[:, None] * stride + k_column
        k = tl.load(qkv_ptr + at, inside, 0.0)
        v = tl.load(qkv_ptr + at + KV_HEADS * DIM, inside, 0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # in units of log 2
        s = tl.where((position < length)[None, :], s, -1.0e30)
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    out = out_ptr + (at_query * HEADS + head) * DIM + column[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), q_mask)


def attend(
    qkv: torch.Tensor,
    query_start: torch.Tensor,
    num_rows: int,
    max_len: int,
    heads: tuple[int, int, int],
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `quire.kernels.attention.prompt`."""
    num_heads, num_kv_heads, dim = heads
    wide = qkv.element_size() == 4
    block_m = 32 if max_len <= 32 else 64
    block_n = 32 if wide or max_len <= 32 else 64
    _prompt_kernel[(num_heads, len(qkv) // block_m + num_rows)](
        qkv, out, query_start, num_rows, qkv.stride(0), scale * LOG2_E,
        HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_DIM=dot_width(dim),
        STAGES=2, PRECISION="ieee" if wide else "tf32", num_warps=4,
    )  # fmt: skip
    return out
