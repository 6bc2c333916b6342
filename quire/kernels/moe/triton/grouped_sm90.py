"""The experts' product down for many choices ordered by expert, for compute capability 9.0, in Gluon.

Tiles come from the device's own table, BLOCK_M choices of one expert each; x lies in their order, so the copy engine
fetches it. A block of threads stays on its processor and works through them. Each consumer has half of a tile's
choices; where an expert's last tile has none for the second, that one leaves the matrix units to the other. Gate and up
have no such kernel: their x lies in the order of the tokens, and to copy it into this one takes what they would gain.
"""

from __future__ import annotations

from functools import partial

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gemm.triton import pipeline_sm90 as pipeline
from quire.kernels.gemm.triton.pipeline_sm90 import (
    allocate,
    fetch,
    finish,
    follow,
    halves,
    in_rows,
    leave,
    multiply,
    row_layout,
)
from quire.kernels.moe.tiling import Tiling
from quire.kernels.triton.launch import cdiv, has_pdl, num_processors
from quire.kernels.triton.launches import launch

ROWS = pipeline.BLOCK_M  # of a tile
_built: set[tuple[object, ...]] = set()  # what kernels were compiled for


@gluon.jit
def _consume(
    x_halves, weight_halves, full, empty, bias_ptr, share_ptr, order_ptr, tiles_ptr, out_ptr, most, steps, tiles_n,
    N: gl.constexpr, NUMBER: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    HALF_M: gl.constexpr = x_halves.shape[1]
    HALF_N: gl.constexpr = weight_halves.shape[1]
    LAYOUT: gl.constexpr = row_layout(HALF_M, HALF_N)
    row = NUMBER * HALF_M + gl.arange(0, HALF_M, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, HALF_N, gl.SliceLayout(0, LAYOUT))
    stage = 0
    parity = 0
    for tile in range(gl.program_id(0), most * tiles_n, gl.num_programs(0)):
        number = tile // tiles_n
        expert = gl.load(tiles_ptr + number)
        if expert >= 0:
            begin = gl.load(tiles_ptr + most + number)
            count = gl.load(tiles_ptr + 2 * most + number)
            if count > NUMBER * HALF_M:
                there = row < count
                choice = gl.load(order_ptr + begin + row, there, 0)
                share = gl.load(share_ptr + choice, there, 0.0)
                sums, stage, parity = multiply(x_halves, weight_halves, full, empty, stage, parity, steps, NUMBER)
                sums, stage, parity = finish(sums, full, empty, stage, parity)
                parts = halves(in_rows(sums))
                for i in gl.static_range(2):
                    n = ((tile % tiles_n) * 2 + i) * HALF_N + column
                    y = gl.convert_layout(parts[i], LAYOUT)
                    if BIAS:
                        y += gl.load(bias_ptr + expert * N + n, n < N, 0.0).to(gl.float32)[None, :]
                    y *= share[:, None]
                    at = out_ptr + choice.to(gl.int64)[:, None] * N + n[None, :]
                    gl.store(at, y.to(out_ptr.dtype.element_ty), there[:, None] & (n < N)[None, :])
            else:
                stage, parity = leave(full, empty, stage, parity, steps)


@gluon.jit
def _produce(x_desc, weight_desc, x_halves, weight_halves, full, empty, tiles_ptr, most, steps, tiles_n,
             N: gl.constexpr):  # fmt: skip
    HALF_N: gl.constexpr = weight_halves.shape[1]
    stage = 0
    parity = 1
    for tile in range(gl.program_id(0), most * tiles_n, gl.num_programs(0)):
        number = tile // tiles_n
        expert = gl.load(tiles_ptr + number)
        if expert >= 0:
            begin = gl.load(tiles_ptr + most + number)
            line = expert * N + (tile % tiles_n) * (2 * HALF_N)
            stage, parity = fetch(
                x_desc, weight_desc, x_halves, weight_halves, full, empty, begin, line, HALF_N, stage, parity, steps
            )


@gluon.jit(do_not_specialize=["most", "K"])
def _down_sm90_kernel(
    x_desc, weight_desc, bias_ptr, share_ptr, order_ptr, tiles_ptr, out_ptr, most, K,
    N: gl.constexpr, HALF_N: gl.constexpr, BIAS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    tiles_n: gl.constexpr = (N + 2 * HALF_N - 1) // (2 * HALF_N)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    x_halves, weight_halves, full, empty = allocate(x_desc, HALF_N, STAGES)
    follow(PDL)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                x_halves, weight_halves, full, empty, bias_ptr, share_ptr, order_ptr, tiles_ptr, out_ptr, most,
                steps, tiles_n, N, FIRST, BIAS,
            )),
            (_consume, (
                x_halves, weight_halves, full, empty, bias_ptr, share_ptr, order_ptr, tiles_ptr, out_ptr, most,
                steps, tiles_n, N, SECOND, BIAS,
            )),
            (_produce, (
                x_desc, weight_desc, x_halves, weight_halves, full, empty, tiles_ptr, most, steps, tiles_n, N,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],  # theirs; the first consumer gets the rest, as many as the second
    )  # fmt: skip


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel is made for x [choices, k] and weight [experts, n, k]: what the copy engine and `interleaved`
    need."""
    narrow = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype
    return narrow and weight.shape[1] % 32 == 0 and weight.shape[2] % 8 == 0


def down(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    share: torch.Tensor,
    out: torch.Tensor,
    tiling: Tiling,
    *,
    compile_only: bool = False,
) -> torch.Tensor:
    """x [choices, k] in the order of `tiling`, with tiles of ROWS → out [choices, n], each where its choice is, times
    its share, float32 [choices].

    weight: [experts, n, k], contiguous; bias: [experts, n].
    """
    experts, n, k = weight.shape
    half_n = pipeline.BLOCK_N // 2
    most = tiling.tiles.shape[1]
    pdl = has_pdl(x.device)
    options = {name: value for name, value in pipeline.OPTIONS.items() if name != "GROUP_M"}
    grid = (min(most * cdiv(n, 2 * half_n), num_processors(x.device)),)
    run = partial(_down_sm90_kernel.warmup, grid=grid) if compile_only else partial(launch, _down_sm90_kernel, grid)
    run(
        pipeline.plain(x, pipeline.BLOCK_M // 2), pipeline.interleaved(weight.view(experts * n, k)),
        x if bias is None else bias, share, tiling.order, tiling.tiles, out, most, k,
        N=n, HALF_N=half_n, BIAS=bias is not None, PDL=pdl, launch_pdl=pdl, **options,
    )  # fmt: skip
    return out


def compile_once(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    share: torch.Tensor,
    out: torch.Tensor,
    tiling: Tiling,
) -> None:
    """All that any number of choices will need: nothing is compiled in mid-service."""
    kind = (x.device, x.dtype, weight.shape[1], bias is None)
    if kind not in _built:
        _built.add(kind)
        down(x, weight, bias, share, out, tiling, compile_only=True)
