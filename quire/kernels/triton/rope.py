"""From the fused qkv projection to attention's inputs in one pass: per-head norm, rotary embedding, cache write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl, next_power_of_2

FEW_TOKENS = 128  # below this, small programs: latency counts; above, large ones: launches do


@triton.jit
def _qk_norm_rope_write_kernel(
    qkv_ptr, cos_sin_ptr, positions_ptr, slots_ptr, k_cache_ptr, v_cache_ptr, q_ptr, q_weight_ptr, k_weight_ptr,
    qkv_stride, cos_sin_stride, k_block_stride, k_head_stride, v_block_stride, v_head_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # q heads, then k heads, then v heads
    column = tl.arange(0, BLOCK_DIM)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    in_dim = column < DIM
    # Rotation pairs column i with i + ROTARY/2; columns from ROTARY on pair with themselves (cos 1, sin 0).
    rotated = column < ROTARY
    first = column < ROTARY // 2
    partner = tl.where(rotated, tl.where(first, column + ROTARY // 2, column - ROTARY // 2), column)
    angle = tl.where(first, column, column - ROTARY // 2)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos_sin = cos_sin_ptr + position * cos_sin_stride + angle
    cos = tl.load(cos_sin, rotated, 1.0)
    sin = tl.load(cos_sin + ROTARY // 2, rotated, 0.0)
    sin = tl.where(first, -sin, sin)
    if PDL:  # what is read above was written before the predecessor started
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    row = qkv_ptr + token * qkv_stride + head[:, None] * DIM
    mask = (is_q | is_k | is_v)[:, None] & in_dim[None, :]
    x = tl.load(row + column[None, :], mask, 0.0).to(tl.float32)  # [heads, dim]
    pair = tl.load(row + partner[None, :], mask, 0.0).to(tl.float32)  # a second look at the same cache lines

    y, y_pair = x, pair
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        q_weight = tl.load(q_weight_ptr + column, in_dim, 0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + column, in_dim, 0.0).to(tl.float32)
        q_weight_pair = tl.load(q_weight_ptr + partner, in_dim, 0.0).to(tl.float32)
        k_weight_pair = tl.load(k_weight_ptr + partner, in_dim, 0.0).to(tl.float32)
        y = x * scale * tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])
        y_pair = pair * scale * tl.where(is_q[:, None], q_weight_pair[None, :], k_weight_pair[None, :])
    y = (y * cos[None, :] + y_pair * sin[None, :]).to(q_ptr.dtype.element_ty)

    q_out = q_ptr + (token * HEADS + head[:, None]) * DIM + column[None, :]
    tl.store(q_out, y, is_q[:, None] & in_dim[None, :])
    block, offset = slot // BLOCK_SIZE, (slot % BLOCK_SIZE) * DIM
    k_head = (head - HEADS)[:, None] * k_head_stride
    v_head = (head - HEADS - KV_HEADS)[:, None] * v_head_stride
    k_out = k_cache_ptr + block * k_block_stride + k_head + offset + column[None, :]
    v_out = v_cache_ptr + block * v_block_stride + v_head + offset + column[None, :]
    tl.store(k_out, y, is_k[:, None] & in_dim[None, :])
    tl.store(v_out, x.to(q_ptr.dtype.element_ty), is_v[:, None] & in_dim[None, :])


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
) -> torch.Tensor:
    """See `quire.kernels.rope`."""
    num_tokens = qkv.shape[0]
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return q
    block_heads = 4 if num_tokens <= FEW_TOKENS else 16
    pdl = has_pdl(qkv.device)
    _qk_norm_rope_write_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, block_heads))](
        qkv, cos_sin, positions, slots, k_cache, v_cache, q,
        qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight,
        qkv.stride(0), cos_sin.stride(0), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        eps, HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, ROTARY=cos_sin.shape[1],
        BLOCK_SIZE=k_cache.shape[2], NORM=q_weight is not None, BLOCK_HEADS=block_heads,
        BLOCK_DIM=next_power_of_2(head_dim), PDL=pdl, num_warps=2 if block_heads == 4 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return q
