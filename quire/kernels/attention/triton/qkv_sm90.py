"""From the normed residual of prompts to attention's inputs in one kernel, for compute capability 9.0, in Gluon: qkv
product, per-head norm, rotary embedding, write to the paged cache.

A tile of the product is whole heads: 2 of 128 columns, 4 of 64. A thread has the columns that rotation pairs, i and
i + dim / 2, of the same two lines, so norm and rotation are arithmetic on its registers, and a sum over four threads.
The weight is read interleaved, so that a thread's columns are eight in a row, which it reads and writes at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gemm.triton import pipeline_sm90 as pipeline
from quire.kernels.gemm.triton.pipeline_sm90 import (
    allocate,
    finish,
    follow,
    halves,
    in_rows,
    multiply,
    place,
    produce,
    row_layout,
)
from quire.kernels.triton.launch import has_pdl
from quire.kernels.triton.launches import launch

if TYPE_CHECKING:
    from quire.kernels.attention.rope import QkvTarget

_built: set[tuple[object, ...]] = set()  # what kernels were compiled for


@gluon.jit
def _heads(x, NUM: gl.constexpr):
    """[lines, NUM * dim] → NUM times [lines, dim]; NUM is 2 or 4."""
    low, high = halves(x)
    if NUM == 4:
        first, second = halves(low)
        third, fourth = halves(high)
        parts = (first, second, third, fourth)
    else:
        parts = (low, high)
    return parts


@gluon.jit
def _write(pointer, at, first, second, alive):
    HALF: gl.constexpr = first.shape[1]
    column = gl.arange(0, HALF, gl.SliceLayout(0, first.type.layout))
    to = pointer + at[:, None] + column[None, :]
    dtype: gl.constexpr = pointer.dtype.element_ty  # of 8 bits: what is beyond its range becomes its largest value
    gl.store(to, first.to(dtype), alive[:, None])
    gl.store(to + HALF, second.to(dtype), alive[:, None])


@gluon.jit
def _consume(
    x_halves, weight_halves, full, empty, bias_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr,
    q_ptr, k_cache_ptr, v_cache_ptr, k_block_stride, k_head_stride, v_block_stride, v_head_stride, eps,
    M, steps, tiles_m, tiles_n,
    NUMBER: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    BIAS: gl.constexpr, NORM: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    HALF_M: gl.constexpr = x_halves.shape[1]
    BLOCK_N: gl.constexpr = 2 * weight_halves.shape[1]
    TILE_HEADS: gl.constexpr = BLOCK_N // DIM
    HALF: gl.constexpr = DIM // 2
    LAYOUT: gl.constexpr = row_layout(HALF_M, HALF)
    column = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    stage = 0
    parity = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = place(tile, tiles_m, tiles_n, GROUP_M)
        token = (2 * m + NUMBER) * HALF_M + gl.arange(0, HALF_M, gl.SliceLayout(1, LAYOUT))
        position = gl.load(positions_ptr + token, token < M, 0).to(gl.int64)
        slot = gl.load(slots_ptr + token, token < M, -1).to(gl.int64)
        sums, stage, parity = multiply(x_halves, weight_halves, full, empty, stage, parity, steps, NUMBER)
        # While the last product is under way; and past the first cache, which shall keep the gains.
        angle = cos_sin_ptr + (position * DIM)[:, None] + column[None, :]
        cos = gl.load(angle, cache_modifier=".cg")
        sin = gl.load(angle + HALF, cache_modifier=".cg")
        sums, stage, parity = finish(sums, full, empty, stage, parity)
        parts = _heads(in_rows(sums), TILE_HEADS)
        for i in gl.static_range(TILE_HEADS):
            head = n * TILE_HEADS + i
            first, second = halves(parts[i])
            first = gl.convert_layout(first, LAYOUT)
            second = gl.convert_layout(second, LAYOUT)
            is_v = head >= HEADS + KV_HEADS
            if BIAS and head < HEADS + 2 * KV_HEADS:
                bias = bias_ptr + head * DIM + column
                first += gl.load(bias).to(gl.float32)[None, :]
                second += gl.load(bias + HALF).to(gl.float32)[None, :]
            if not is_v:
                if NORM:
                    gain = gl.where(head < HEADS, q_weight_ptr, k_weight_ptr) + column
                    squares = gl.sum(first * first + second * second, axis=1)
                    scale = gl.rsqrt(squares * (1.0 / DIM) + eps)[:, None]
                    first = first * scale * gl.load(gain).to(gl.float32)[None, :]
                    second = second * scale * gl.load(gain + HALF).to(gl.float32)[None, :]
                turned = first * cos - second * sin
                second = second * cos + first * sin
                first = turned
            if head < HEADS:
                at = token.to(gl.int64) * (HEADS * DIM) + head * DIM
                _write(q_ptr, at, first, second, token < M)
            elif head < HEADS + 2 * KV_HEADS:
                kv_head = head - gl.where(is_v, HEADS + KV_HEADS, HEADS)
                block_stride = gl.where(is_v, v_block_stride, k_block_stride)
                head_stride = gl.where(is_v, v_head_stride, k_head_stride)
                at = slot // PAGE * block_stride + slot % PAGE * DIM + kv_head.to(gl.int64) * head_stride
                _write(gl.where(is_v, v_cache_ptr, k_cache_ptr), at, first, second, slot >= 0)


@gluon.jit(do_not_specialize=["M", "K"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _qkv_sm90_kernel(
    x_desc, weight_desc, bias_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr,
    q_ptr, k_cache_ptr, v_cache_ptr, k_block_stride, k_head_stride, v_block_stride, v_head_stride, eps, M, K,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    BIAS: gl.constexpr, NORM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PDL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    HALF_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    HALF_N: gl.constexpr = BLOCK_N // 2
    N: gl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    tiles_m = (M + 2 * HALF_M - 1) // (2 * HALF_M)
    tiles_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    steps = (K + BLOCK_K - 1) // BLOCK_K
    x_halves, weight_halves, full, empty = allocate(x_desc, HALF_N, STAGES)
    follow(PDL)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                x_halves, weight_halves, full, empty, bias_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr,
                slots_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_block_stride, k_head_stride, v_block_stride,
                v_head_stride, eps, M, steps, tiles_m, tiles_n,
                FIRST, HEADS, KV_HEADS, DIM, PAGE, BIAS, NORM, GROUP_M,
            )),
            (_consume, (
                x_halves, weight_halves, full, empty, bias_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr,
                slots_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_block_stride, k_head_stride, v_block_stride,
                v_head_stride, eps, M, steps, tiles_m, tiles_n,
                SECOND, HEADS, KV_HEADS, DIM, PAGE, BIAS, NORM, GROUP_M,
            )),
            (produce, (
                x_desc, weight_desc, x_halves, weight_halves, full, empty, BLOCK_N, HALF_N, steps, tiles_m, tiles_n,
                GROUP_M,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],  # theirs; the first consumer gets the rest, as many as the second
    )  # fmt: skip


def takes(head_dim: int, rotary_dim: int, block_size: int) -> bool:
    """Whether the kernel is made for such heads: whole ones of them make a tile, and all of their columns turn."""
    return head_dim in (64, 128) and rotary_dim == head_dim and block_size & (block_size - 1) == 0


def compile_once(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: QkvTarget) -> None:
    """All that any number of rows of such a model will need: nothing is compiled in mid-service."""
    model = (x.device, x.dtype, place.k_cache.dtype, place.k_cache.shape[2], place.num_heads, place.num_kv_heads,
             place.head_dim, bias is None, place.q_weight is None)  # fmt: skip
    if model not in _built:
        _launch(x, weight, bias, place, compile_only=True)
        _built.add(model)


def qkv_rope_write(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: QkvTarget) -> torch.Tensor:
    """See `quire.kernels.attention.qkv`, for what this module `takes`; x is normed."""
    return _launch(x, weight, bias, place)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: QkvTarget, *, compile_only: bool = False
) -> torch.Tensor:
    m, k = x.shape
    q = torch.empty((m, place.num_heads, place.head_dim), dtype=x.dtype, device=x.device)
    k_cache, v_cache = place.k_cache, place.v_cache
    absent = x  # a pointer that nothing is read from
    arguments = (
        pipeline.plain(x, pipeline.BLOCK_M // 2), pipeline.interleaved(weight), absent if bias is None else bias,
        absent if place.q_weight is None else place.q_weight, absent if place.k_weight is None else place.k_weight,
        place.cos_sin, place.positions, place.slots, q, k_cache, v_cache,
        k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1), place.eps, m, k,
    )  # fmt: skip
    pdl = has_pdl(x.device)
    options = {
        "HEADS": place.num_heads, "KV_HEADS": place.num_kv_heads, "DIM": place.head_dim, "PAGE": k_cache.shape[2],
        "BIAS": bias is not None, "NORM": place.q_weight is not None, "BLOCK_N": pipeline.BLOCK_N, "PDL": pdl,
        "launch_pdl": pdl, **pipeline.OPTIONS,
    }  # fmt: skip
    grid = pipeline.grid(m, len(weight), x.device)
    if compile_only:
        _qkv_sm90_kernel.warmup(*arguments, grid=grid, **options)
    else:
        launch(_qkv_sm90_kernel, grid, *arguments, **options)
    return q
