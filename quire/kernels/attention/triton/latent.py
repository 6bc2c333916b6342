"""Queries' rotary columns turned, and each token's latent row normed, its rotary key turned, and written to the cache:
one pass. Of a token one program takes the row, others a few query heads each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl, next_power_of_2

HEADS = (
    4  # of a program of one warp: columns that turn in pairs lie apart, and threads would go through more of them badly
)


@triton.jit
def turn_and_write(
    token, group, q_ptr, latent_ptr, out_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr,
    q_stride, q_head_stride, latent_stride, out_stride, out_head_stride, cos_sin_stride, block_stride, eps,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token's row if `group` is 0, else the query heads of a group, counted from 1."""
    # Of columns that are turned with one another, where the first of all lie, and how far behind one the other is.
    EVERY: tl.constexpr = 2 if INTERLEAVED else 1
    OTHER: tl.constexpr = 1 if INTERLEAVED else ROPE // 2
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < ROPE // 2
    angle = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride + half
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos, sin = tl.load(angle, in_half, 1.0), tl.load(angle + ROPE // 2, in_half, 0.0)
    if PDL:  # what is read above is the step's own input
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if group == 0:
        column = tl.arange(0, BLOCK_RANK)
        in_rank, in_cache = column < RANK, slot >= 0
        row = latent_ptr + token * latent_stride
        x = tl.load(row + column, in_rank, 0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps) * tl.load(weight_ptr + column, in_rank, 0.0).to(tl.float32)
        first = tl.load(row + RANK + half * EVERY, in_half, 0.0).to(tl.float32)
        second = tl.load(row + RANK + OTHER + half * EVERY, in_half, 0.0).to(tl.float32)
        place = cache_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (RANK + ROPE)
        kept = cache_ptr.dtype.element_ty
        tl.store(place + column, x.to(kept), in_rank & in_cache)
        tl.store(place + RANK + half * EVERY, (first * cos - second * sin).to(kept), in_half & in_cache)
        tl.store(place + RANK + OTHER + half * EVERY, (second * cos + first * sin).to(kept), in_half & in_cache)
    else:
        head = ((group - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        there = (head < NUM_HEADS) & in_half[None, :]
        at = q_ptr + token * q_stride + head * q_head_stride + (half * EVERY)[None, :]
        to = out_ptr + token * out_stride + head * out_head_stride + (half * EVERY)[None, :]
        firsts, seconds = tl.load(at, there, 0.0).to(tl.float32), tl.load(at + OTHER, there, 0.0).to(tl.float32)
        made = out_ptr.dtype.element_ty
        tl.store(to, (firsts * cos[None, :] - seconds * sin[None, :]).to(made), there)
        tl.store(to + OTHER, (seconds * cos[None, :] + firsts * sin[None, :]).to(made), there)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_write_kernel(
    q_ptr, latent_ptr, out_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr,
    q_stride, q_head_stride, latent_stride, out_stride, out_head_stride, cos_sin_stride, block_stride, eps,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    turn_and_write(
        tl.program_id(0).to(tl.int64), tl.program_id(1), q_ptr, latent_ptr, out_ptr, weight_ptr, cos_sin_ptr,
        positions_ptr, slots_ptr, cache_ptr, q_stride, q_head_stride, latent_stride, out_stride, out_head_stride,
        cos_sin_stride, block_stride, eps, HEADS, RANK, ROPE, BLOCK_SIZE, BLOCK_HEADS, BLOCK_RANK, BLOCK_HALF,
        INTERLEAVED, PDL,
    )  # fmt: skip


def rope_write(
    q: torch.Tensor,
    latent: torch.Tensor,
    out: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    interleaved: bool,
) -> None:
    """See `quire.kernels.attention.latent`."""
    tokens, heads, rope = q.shape
    if not tokens:
        return
    weight, eps = norm
    pdl = has_pdl(q.device)
    _rope_write_kernel[(tokens, 1 + -(-heads // HEADS))](
        q, latent, out, weight, cos_sin, positions, slots, cache, q.stride(0), q.stride(1), latent.stride(0),
        out.stride(0), out.stride(1), cos_sin.stride(0), cache.stride(0), eps, HEADS=heads, RANK=len(weight), ROPE=rope,
        BLOCK_SIZE=cache.shape[2], BLOCK_HEADS=HEADS, BLOCK_RANK=next_power_of_2(len(weight)),
        BLOCK_HALF=next_power_of_2(rope // 2), INTERLEAVED=interleaved, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
