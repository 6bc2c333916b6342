"""From the fused qkv projection to attention's inputs in one pass: per-head norm, rotary embedding, cache write.

A program takes a few heads of one kind (query, key or value) of a few tokens. The two halves that rotation pairs are
separate tiles, so every element is read once and the turn is plain arithmetic between tiles.

Few tokens: what is known before the step (positions, angles) is read before the predecessor has ended. Many: reading
the heads comes first, since the chain position → angle would otherwise leave the memory idle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl, next_power_of_2

FEW_TOKENS = 128  # up to this, latency counts; above, bytes do


@triton.jit
def _angles(cos_sin_ptr, positions_ptr, token, alive, cos_sin_stride, half, HALF: tl.constexpr):
    """cos and sin of each token's position, [tokens, 1, half]."""
    position = tl.load(positions_ptr + token, alive, 0).to(tl.int64)
    angle = cos_sin_ptr + position[:, None] * cos_sin_stride + half[None, :]
    mask = alive[:, None] & (half < HALF)[None, :]
    return tl.load(angle, mask, 1.0)[:, None, :], tl.load(angle + HALF, mask, 0.0)[:, None, :]


@triton.jit
def _gains(weight_ptr, half, HALF: tl.constexpr):
    """The norm's weights of both halves, [1, 1, half]."""
    mask = half < HALF
    first = tl.load(weight_ptr + half, mask, 0.0).to(tl.float32)
    second = tl.load(weight_ptr + half + HALF, mask, 0.0).to(tl.float32)
    return first[None, None, :], second[None, None, :]


@triton.jit(do_not_specialize=["num_tokens"])
def _qk_norm_rope_write_kernel(
    qkv_ptr, cos_sin_ptr, positions_ptr, slots_ptr, k_cache_ptr, v_cache_ptr, q_ptr, q_weight_ptr, k_weight_ptr,
    num_tokens, qkv_stride, cos_sin_stride, k_block_stride, k_head_stride, v_block_stride, v_head_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr, TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROTARY // 2
    Q_GROUPS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_GROUPS: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    group = tl.program_id(1)  # of query heads, then of key heads, then of value heads
    is_q = group < Q_GROUPS
    is_v = group >= Q_GROUPS + KV_GROUPS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_tokens = token < num_tokens
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    turned = in_tokens & (not is_v)
    weight_ptr = tl.where(is_q, q_weight_ptr, k_weight_ptr)
    if EARLY:
        if NORM:
            first_weight, second_weight = _gains(weight_ptr, half, HALF)
        cos, sin = _angles(cos_sin_ptr, positions_ptr, token, turned, cos_sin_stride, half, HALF)
        slot = tl.load(slots_ptr + token, in_tokens, -1).to(tl.int64)
    if PDL:  # what is read above was written before the predecessor started
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Which heads of the kind, how many it has, and where its first lies in a line of qkv. Selected rather than branched
    # for, here and below: the compiler keeps track of what is aligned.
    kind_group = group - tl.where(is_q, 0, tl.where(is_v, Q_GROUPS + KV_GROUPS, Q_GROUPS))
    heads = tl.where(is_q, HEADS, KV_HEADS)
    source = tl.where(is_q, 0, tl.where(is_v, (HEADS + KV_HEADS) * DIM, HEADS * DIM))
    head = kind_group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    in_heads = (head < heads)[None, :, None]
    there = in_tokens[:, None, None] & in_heads
    row = qkv_ptr + (token.to(tl.int64) * qkv_stride + source)[:, None, None] + (head * DIM)[None, :, None]
    columns, column_mask = half[None, None, :], in_half[None, None, :]
    first = tl.load(row + columns, there & column_mask, 0.0).to(tl.float32)  # [tokens, heads, half]
    second = tl.load(row + HALF + columns, there & column_mask, 0.0).to(tl.float32)
    rest_columns = (ROTARY + tl.arange(0, BLOCK_REST))[None, None, :]
    rest_mask = rest_columns < DIM
    rest = tl.zeros([TOKENS, BLOCK_HEADS, BLOCK_REST], tl.float32)
    if ROTARY < DIM:
        rest = tl.load(row + rest_columns, there & rest_mask, 0.0).to(tl.float32)
    if not EARLY:
        cos, sin = _angles(cos_sin_ptr, positions_ptr, token, turned, cos_sin_stride, half, HALF)
        slot = tl.load(slots_ptr + token, in_tokens, -1).to(tl.int64)

    # Where the results go.
    out_ptr = tl.where(is_q, q_ptr, tl.where(is_v, v_cache_ptr, k_cache_ptr))
    head_stride = tl.where(is_q, DIM, tl.where(is_v, v_head_stride, k_head_stride))
    block_stride = tl.where(is_v, v_block_stride, k_block_stride)
    cache_place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * DIM
    place = tl.where(is_q, token.to(tl.int64) * (HEADS * DIM), cache_place)
    out = out_ptr + place[:, None, None] + (head.to(tl.int64) * head_stride)[None, :, None]
    wanted = (in_tokens & (is_q | (slot >= 0)))[:, None, None] & in_heads
    if not is_v:
        if NORM:
            if not EARLY:
                first_weight, second_weight = _gains(weight_ptr, half, HALF)
            squares = tl.sum(first * first + second * second, axis=2)
            if ROTARY < DIM:
                squares += tl.sum(rest * rest, axis=2)
                rest_weight = tl.load(weight_ptr + rest_columns, rest_mask, 0.0).to(tl.float32)
            scale = tl.rsqrt(squares / DIM + eps)[:, :, None]
            first = first * scale * first_weight
            second = second * scale * second_weight
            if ROTARY < DIM:
                rest = rest * scale * rest_weight
        first, second = first * cos - second * sin, second * cos + first * sin
    tl.store(out + columns, first.to(q_ptr.dtype.element_ty), wanted & column_mask)
    tl.store(out + HALF + columns, second.to(q_ptr.dtype.element_ty), wanted & column_mask)
    if ROTARY < DIM:
        tl.store(out + rest_columns, rest.to(q_ptr.dtype.element_ty), wanted & rest_mask)


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
    tile: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """See `quire.kernels.rope`; `tile` (tokens, heads, warps) is for measuring."""
    num_tokens, rotary = qkv.shape[0], cos_sin.shape[1]
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return q
    few = num_tokens <= FEW_TOKENS
    tokens, heads, num_warps = tile or ((1, 8, 4) if few else (8, 4, 4))
    groups = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
    pdl = has_pdl(qkv.device)
    _qk_norm_rope_write_kernel[(-(-num_tokens // tokens), groups)](
        qkv, cos_sin, positions, slots, k_cache, v_cache, q,
        qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, num_tokens,
        qkv.stride(0), cos_sin.stride(0), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        eps, HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, ROTARY=rotary, BLOCK_SIZE=k_cache.shape[2],
        NORM=q_weight is not None, TOKENS=tokens, BLOCK_HEADS=heads, BLOCK_HALF=next_power_of_2(rotary // 2),
        BLOCK_REST=next_power_of_2(max(head_dim - rotary, 1)), EARLY=few, PDL=pdl, num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return q
