"""From the fused qkv projection to attention's inputs in one pass: per-head norm, rotary embedding, cache write.

A program takes a few heads of one kind (query, key or value) of a few tokens. The two halves that rotation pairs are
separate tiles, so every element is read once and the turn is plain arithmetic between tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl, next_power_of_2
from quire.kernels.triton.launches import launch

FEW_TOKENS = 128  # up to this, latency counts; above, bytes do


@triton.jit
def _added(at, there, step, PARTS: tl.constexpr):
    """The sum of what lies `step` apart, in float32."""
    total = tl.load(at, there, 0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * step, there, 0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _qk_norm_rope_write_kernel(
    qkv_ptr, cos_sin_ptr, positions_ptr, slots_ptr, k_cache_ptr, v_cache_ptr, q_ptr, q_weight_ptr, k_weight_ptr,
    num_tokens, qkv_stride, part_stride, cos_sin_stride, k_block_stride, k_head_stride, v_block_stride, v_head_stride,
    eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr, TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, SAME_TYPE: tl.constexpr, PDL: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM_LAST: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROTARY // 2
    # Of columns that are turned with one another, where the first of all lie, and how far behind one the other is.
    EVERY: tl.constexpr = 2 if INTERLEAVED else 1
    OTHER: tl.constexpr = 1 if INTERLEAVED else HALF
    Q_GROUPS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_GROUPS: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    group = tl.program_id(1)  # of query heads, then of key heads, then of value heads
    is_q = group < Q_GROUPS
    is_v = group >= Q_GROUPS + KV_GROUPS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_tokens = token < num_tokens
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    position = tl.load(positions_ptr + token, in_tokens, 0).to(tl.int64)
    slot = tl.load(slots_ptr + token, in_tokens, -1).to(tl.int64)
    angle = cos_sin_ptr + position[:, None] * cos_sin_stride + half[None, :]
    turns = (in_tokens & (not is_v))[:, None] & in_half[None, :]
    cos = tl.load(angle, turns, 1.0)[:, None, :]  # [tokens, 1, half]
    sin = tl.load(angle + HALF, turns, 0.0)[:, None, :]
    if NORM:
        weight_ptr = tl.where(is_q, q_weight_ptr, k_weight_ptr)
        first_weight = tl.load(weight_ptr + half * EVERY, in_half, 0.0).to(tl.float32)[None, None, :]
        second_weight = tl.load(weight_ptr + half * EVERY + OTHER, in_half, 0.0).to(tl.float32)[None, None, :]
    if PDL:  # what is read above is the step's own input
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    # Where the kind's first head lies in a line of qkv, how many it has, and where its results go. Selected rather than
    # branched for: the compiler keeps track of what is aligned.
    kind_group = group - tl.where(is_q, 0, tl.where(is_v, Q_GROUPS + KV_GROUPS, Q_GROUPS))
    heads = tl.where(is_q, HEADS, KV_HEADS)
    source = tl.where(is_q, 0, tl.where(is_v, (HEADS + KV_HEADS) * DIM, HEADS * DIM))
    if SAME_TYPE:
        out_ptr = tl.where(is_q, q_ptr, tl.where(is_v, v_cache_ptr, k_cache_ptr))
    else:
        out_ptr = tl.where(is_v, v_cache_ptr, k_cache_ptr)
    head_stride = tl.where(is_q, DIM, tl.where(is_v, v_head_stride, k_head_stride))
    block_stride = tl.where(is_v, v_block_stride, k_block_stride)
    cache_place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * DIM
    place = tl.where(is_q, token.to(tl.int64) * (HEADS * DIM), cache_place)
    alive = in_tokens & (is_q | (slot >= 0))
    head = kind_group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    in_heads = (head < heads)[None, :, None]
    row = qkv_ptr + (token.to(tl.int64) * qkv_stride + source)[:, None, None] + (head * DIM)[None, :, None]
    out = out_ptr + place[:, None, None] + (head.to(tl.int64) * head_stride)[None, :, None]
    there = in_tokens[:, None, None] & in_heads
    wanted = alive[:, None, None] & in_heads
    columns, column_mask = (half * EVERY)[None, None, :], in_half[None, None, :]

    first = _added(row + columns, there & column_mask, part_stride, PARTS)  # [tokens, heads, half]
    second = _added(row + OTHER + columns, there & column_mask, part_stride, PARTS)
    rest_columns = (ROTARY + tl.arange(0, BLOCK_REST))[None, None, :]
    rest_mask = rest_columns < DIM
    rest = tl.zeros([TOKENS, BLOCK_HEADS, BLOCK_REST], tl.float32)
    if ROTARY < DIM:
        rest = _added(row + rest_columns, there & rest_mask, part_stride, PARTS)
    if not is_v:
        if NORM_LAST:
            turned = first * cos - second * sin
            second = second * cos + first * sin
            first = turned
        if NORM:
            squares = tl.sum(first * first + second * second, axis=2)
            if ROTARY < DIM:
                squares += tl.sum(rest * rest, axis=2)
                rest_weight = tl.load(weight_ptr + rest_columns, rest_mask, 0.0).to(tl.float32)
            scale = tl.rsqrt(squares / DIM + eps)[:, :, None]
            first = first * scale * first_weight
            second = second * scale * second_weight
            if ROTARY < DIM:
                rest = rest * scale * rest_weight
        if not NORM_LAST:
            turned = first * cos - second * sin
            second = second * cos + first * sin
            first = turned
    if not SAME_TYPE and is_q:
        out_q = q_ptr + place[:, None, None] + (head.to(tl.int64) * head_stride)[None, :, None]
        tl.store(out_q + columns, first.to(q_ptr.dtype.element_ty), wanted & column_mask)
        tl.store(out_q + OTHER + columns, second.to(q_ptr.dtype.element_ty), wanted & column_mask)
        if ROTARY < DIM:
            tl.store(out_q + rest_columns, rest.to(q_ptr.dtype.element_ty), wanted & rest_mask)
        return
    tl.store(out + columns, first.to(out_ptr.dtype.element_ty), wanted & column_mask)
    tl.store(out + OTHER + columns, second.to(out_ptr.dtype.element_ty), wanted & column_mask)
    if ROTARY < DIM:
        tl.store(out + rest_columns, rest.to(out_ptr.dtype.element_ty), wanted & rest_mask)


def qk_norm_rope_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    interleaved: bool = False,
    norm_last: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """See `quire.kernels.attention.rope`; qkv may be [tokens, parts, n]. `tile` (tokens, heads, warps) is for
    measuring."""
    num_tokens, rotary = qkv.shape[0], cos_sin.shape[1]
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return q
    tokens, heads, num_warps = tile or ((1, 8, 4) if num_tokens <= FEW_TOKENS else (8, 4, 4))
    groups = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
    pdl = has_pdl(qkv.device)
    launch(_qk_norm_rope_write_kernel, (-(-num_tokens // tokens), groups),
        qkv, cos_sin, positions, slots, k_cache, v_cache, q,
        qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, num_tokens,
        qkv.stride(0), qkv.stride(-2), cos_sin.stride(0), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0),
        v_cache.stride(1), eps,
        HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, ROTARY=rotary, BLOCK_SIZE=k_cache.shape[2],
        NORM=q_weight is not None, TOKENS=tokens, BLOCK_HEADS=heads, BLOCK_HALF=next_power_of_2(rotary // 2),
        BLOCK_REST=next_power_of_2(max(head_dim - rotary, 1)), SAME_TYPE=k_cache.dtype == qkv.dtype, PDL=pdl,
        INTERLEAVED=interleaved, NORM_LAST=norm_last,
        PARTS=1 if qkv.dim() == 2 else qkv.shape[1], num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return q
