"""Attention of decode rows over the leading tokens they have in common: read once for a tile of rows.

A program holds the queries of a tile of rows under one KV head and goes through one share of their common
tokens, unmasked and through full matrix tiles; it leaves normalised results and log-sum-exps, which the decode kernel
adds to what it finds in a row's own tokens (Juravsky et al., Hydragen, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.attention.triton.decode_schedule import ITEM
from quire.kernels.attention.triton.operand import cap, query_operand, softcapped
from quire.kernels.triton.launch import dot_width, has_pdl, next_power_of_2


@triton.jit
def _pass(
    acc, top, total, q, table, k_head, v_head, begin, end, block_stride, scale,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One online-softmax pass over tokens [begin, end), whole tiles unless MASKED; scores are in units of log 2."""
    token = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_DIM)
    in_dim = (column < DIM)[None, :]
    position = begin + token
    inner = ((position % BLOCK_SIZE) * DIM)[:, None] + column[None, :]  # place within a block
    block = tl.load(table + position // BLOCK_SIZE, position < end, 0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + token
        if BLOCK_SIZE > BLOCK_N:
            inner = ((position % BLOCK_SIZE) * DIM)[:, None] + column[None, :]
        at = (block.to(tl.int64) * block_stride)[:, None] + inner
        ahead = position + BLOCK_N  # the next tile's blocks are looked up while this tile is on its way
        block = tl.load(table + ahead // BLOCK_SIZE, ahead < end, 0)
        if MASKED:
            inside = (position < end)[:, None] & in_dim
            k, v = tl.load(k_head + at, inside, 0.0), tl.load(v_head + at, inside, 0.0)
        elif BLOCK_DIM != DIM:
            k, v = tl.load(k_head + at, in_dim, 0.0), tl.load(v_head + at, in_dim, 0.0)
        else:
            k, v = tl.load(k_head + at), tl.load(v_head + at)
        k, v = k.to(q.dtype), v.to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [lines, tokens]
        if SOFTCAP > 0:
            s = softcapped(s * scale, SOFTCAP) / scale
        if MASKED:
            s = tl.where((position < end)[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1) * scale)
        p = tl.exp2(s * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(
    do_not_specialize_on_alignment=["partial_ptr", "lse_ptr", "items_ptr", "count_ptr", "members_ptr"],
)
def _prefix_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, items_ptr, count_ptr, members_ptr, table_ptr,
    q_stride, table_stride, block_stride, head_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, ITEM: tl.constexpr, PDL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_DIM)
    count = tl.load(count_ptr)
    if PDL:  # in this order: `decode` reads q and the new KV, which the predecessor writes, ahead of its own wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    k_head, v_head = k_ptr + kv_head.to(tl.int64) * head_stride, v_ptr + kv_head.to(tl.int64) * head_stride
    head = kv_head * GROUP + line % GROUP
    for item in range(tl.program_id(1), count, tl.num_programs(1)):
        at_item = items_ptr + item * ITEM
        table = table_ptr + tl.load(at_item).to(tl.int64) * table_stride
        first_member, members = tl.load(at_item + 1), tl.load(at_item + 2)
        begin, end = tl.load(at_item + 3), tl.load(at_item + 4)
        place = tl.load(at_item + 5).to(tl.int64) + line // GROUP
        alive = line // GROUP < members
        row = tl.load(members_ptr + first_member + line // GROUP, alive, 0).to(tl.int64)
        mask = alive[:, None] & (column < DIM)[None, :]
        q = tl.load(q_ptr + (row * q_stride + head * DIM)[:, None] + column[None, :], mask, 0.0)
        q = query_operand(q, k_ptr)

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
        whole = begin + (end - begin) // BLOCK_N * BLOCK_N
        acc, top, total = _pass(
            acc, top, total, q, table, k_head, v_head, begin, whole, block_stride, scale, DIM, BLOCK_SIZE, False,
            BLOCK_N, BLOCK_DIM, STAGES, PRECISION, SOFTCAP,
        )  # fmt: skip
        acc, top, total = _pass(
            acc, top, total, q, table, k_head, v_head, whole, end, block_stride, scale, DIM, BLOCK_SIZE, True,
            BLOCK_N, BLOCK_DIM, STAGES, PRECISION, SOFTCAP,
        )  # fmt: skip
        result = (place * (HEADS // GROUP) + kv_head) * GROUP + line % GROUP
        tl.store(partial_ptr + result[:, None] * DIM + column[None, :], acc / total[:, None], mask)
        tl.store(lse_ptr + result, top + tl.log2(total), alive)


@dataclass(frozen=True, slots=True)
class PrefixShape:
    """How the kernel is cut for a head's width, as measured on an H200."""

    lines: int
    tokens: int  # a tile
    warps: int
    stages: int
    programs: int  # a processor
    min_tiles: int  # of a share


def lines(group: int) -> int:
    """Queries times heads in a tile, for `group` heads a KV head; what `prefix_tile_rows` goes by."""
    return 64 if group <= 16 else 128


def shape(head_dim: int, element_size: int, group: int) -> PrefixShape:
    wide = lines(group)
    if element_size == 4:
        return PrefixShape(wide, 32, wide // 8, 1, 1, 8)
    if next_power_of_2(head_dim) > 128:
        return PrefixShape(wide, 32, wide // 16, 2, 1, 8)
    return PrefixShape(wide, 64, 4, 3, 2, 4) if wide == 64 else PrefixShape(wide, 64, 8, 3, 1, 4)


def programs(num_kv_heads: int, processors: int, per_processor: int) -> int:
    """Programs a KV head."""
    return max(per_processor * processors // num_kv_heads, 1)


def places(num_rows: int, tile_rows: int, programs: int) -> int:
    """Results (of a row in a share) there are at most: one a row, and a tile's in every further share."""
    return num_rows + min(num_rows, tile_rows) * programs


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    items: torch.Tensor,
    count: torch.Tensor,
    members: torch.Tensor,
    scale: float,
    partial: torch.Tensor,
    lse: torch.Tensor,
    programs: int,
    cut: PrefixShape,
    softcap: float = 0.0,
) -> None:
    """q [rows, heads, dim] over the shares of prefixes in `items` (see `decode_schedule.prefixes`).

    Scores times `scale` are in units of log 2. Writes results [places, heads, dim] and their log-sum-exps, base 2,
    [places, heads], both float32.
    """
    _, num_heads, dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    pdl = has_pdl(q.device)
    _prefix_kernel[(num_kv_heads, programs)](
        q, k_cache, v_cache, partial, lse, items, count, members, block_table, q.stride(0), block_table.stride(0),
        k_cache.stride(0), k_cache.stride(1), scale, HEADS=num_heads, GROUP=num_heads // num_kv_heads, DIM=dim,
        BLOCK_SIZE=block_size, BLOCK_M=cut.lines, BLOCK_N=cut.tokens, BLOCK_DIM=dot_width(dim), STAGES=cut.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", ITEM=ITEM, PDL=pdl, SOFTCAP=cap(softcap),
        num_warps=cut.warps,         launch_pdl=pdl,
    )  # fmt: skip
