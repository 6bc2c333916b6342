"""silu(x @ gate.T) * (x @ up.T) for the rows of prompts, for compute capability 9.0, in Gluon.

A tile's weight is as many lines of gate as of up. One matrix instruction takes both, so the sums that belong together
end up in the same thread, and their product leaves the processor instead of both.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.attention.triton.decode import LOG2_E
from quire.kernels.gemm.triton import pipeline_sm90 as pipeline
from quire.kernels.gemm.triton.pipeline_sm90 import allocate, finish, follow, halves, multiply, place, produce, swish
from quire.kernels.triton.descriptors import described
from quire.kernels.triton.launch import has_pdl
from quire.kernels.triton.launches import launch

_built: set[tuple[torch.device, torch.dtype]] = set()  # what the kernel was compiled for


@gluon.jit
def _consume(
    out_desc, x_halves, weight_halves, out_tiles, full, empty, steps, tiles_m, tiles_n,
    NUMBER: gl.constexpr, GROUP_M: gl.constexpr, LOG2_E: gl.constexpr,
):  # fmt: skip
    HALF_M: gl.constexpr = out_tiles.shape[1]
    COLUMNS: gl.constexpr = out_tiles.shape[2]
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    out_tile = out_tiles.index(NUMBER)
    stage = 0
    parity = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        both, stage, parity = multiply(x_halves, weight_halves, full, empty, stage, parity, steps, NUMBER)
        both, stage, parity = finish(both, full, empty, stage, parity)
        gate, up = halves(both)
        y = swish(gate, up, LOG2_E)
        tma.store_wait(0)
        gl.thread_barrier()  # the tile before this one has left its place
        out_tile.store(gl.convert_layout(y.to(out_tiles.dtype), OUT_LAYOUT))
        fence_async_shared()
        gl.thread_barrier()
        m, n = place(tile, tiles_m, tiles_n, GROUP_M)
        tma.async_copy_shared_to_global(out_desc, [(2 * m + NUMBER) * HALF_M, n * COLUMNS], out_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def _gated_sm90_kernel(
    x_desc, weight_desc, out_desc, M, N, K,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, LOG2_E: gl.constexpr, PDL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    HALF_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = weight_desc.block_type.shape[0]
    tiles_m = (M + 2 * HALF_M - 1) // (2 * HALF_M)
    tiles_n = (N + COLUMNS - 1) // COLUMNS
    steps = (K + BLOCK_K - 1) // BLOCK_K
    x_halves, weight_halves, full, empty = allocate(x_desc, COLUMNS, STAGES)
    out_tiles = gl.allocate_shared_memory(x_desc.dtype, [2, HALF_M, COLUMNS], out_desc.layout)
    follow(PDL)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, x_halves, weight_halves, out_tiles, full, empty, steps, tiles_m, tiles_n,
                FIRST, GROUP_M, LOG2_E,
            )),
            (_consume, (
                out_desc, x_halves, weight_halves, out_tiles, full, empty, steps, tiles_m, tiles_n,
                SECOND, GROUP_M, LOG2_E,
            )),
            (produce, (
                x_desc, weight_desc, x_halves, weight_halves, full, empty, COLUMNS, N, steps, tiles_m, tiles_n, GROUP_M,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],  # theirs; the first consumer gets the rest, as many as the second
    )  # fmt: skip


def _launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, compile_only: bool = False) -> None:
    (m, k), n = x.shape, weight.shape[0] // 2
    out_desc = described(TensorDescriptor, out, (pipeline.BLOCK_M // 2, pipeline.BLOCK_N // 2), pipeline.SWIZZLED)
    arguments = (
        pipeline.plain(x, pipeline.BLOCK_M // 2), pipeline.plain(weight, pipeline.BLOCK_N // 2), out_desc, m, n, k
    )  # fmt: skip
    pdl = has_pdl(x.device)
    options = {**pipeline.OPTIONS, "LOG2_E": LOG2_E, "PDL": pdl, "launch_pdl": pdl}
    grid = pipeline.grid(m, 2 * n, x.device)
    if compile_only:
        _gated_sm90_kernel.warmup(*arguments, grid=grid, **options)
    else:
        launch(_gated_sm90_kernel, grid, *arguments, **options)


def compile_once(x: torch.Tensor, weight: torch.Tensor) -> None:
    """All that any number of rows of x's dtype will need: nothing is compiled in mid-service."""
    if (x.device, x.dtype) not in _built:
        _launch(x, weight, x.new_empty(len(x), len(weight) // 2), compile_only=True)
        _built.add((x.device, x.dtype))


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [m, k], weight [2n, k] = [gate | up] → [m, n]; n, k and what rows are apart are multiples of 8."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, out)
    return out
