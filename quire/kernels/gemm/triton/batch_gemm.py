"""x @ weight.T for up to 128 rows in tiles: the weight is read once, and everything around the product rides along.

A program owns BLOCK_N outputs of BLOCK_M rows and one of SPLIT shares of K. Tiles of x and of the weight come through
the bulk copy engine, several deep. Where outputs are few, K is shared out: each program leaves its sums in a workspace
and the one that comes last (a counter a tile, set back to zero by the one who merges) adds them up in order of the
shares, so a result does not depend on who came when.

With programmatic dependent launch a program sends for its part of the weight, which no kernel of a step writes, before
it waits for its predecessor. An RMS norm on the way in is a kernel of its own: it takes 1.3 µs, in which the weight is
on its way already, where squaring and scaling x in every program's loop took twice that.

A weight of 8-bit floats is multiplied as it is, by x in 8 bits as well; sums are scaled by row and output. (Widened on
its way to the matrix units it would hold them up: what they have begun must end before its registers are reused.)
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.elementwise.triton import norm
from quire.kernels.gemm.triton.plan import MAX_ROWS, Tiles
from quire.kernels.triton.launch import cdiv, has_pdl

WORKSPACE = 1 << 23  # float32 elements for the shares of K of one product
MAX_TILES = 4096  # that share K, in one product


@triton.jit
def _prefetch(weight_ptr, row_stride, first_row, num_rows, begin, columns, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Asks the L2 cache for `columns` (PARTS times a multiple of 16 bytes) of ROWS weight rows, one request a row and
    part."""
    row = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
    part = columns // PARTS
    at = weight_ptr + row[:, None] * row_stride + (begin + tl.arange(0, PARTS) * part)[None, :]
    num_bytes = tl.zeros([ROWS, PARTS], tl.int32) + part * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [at.to(tl.uint64, bitcast=True), num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _outputs(
    y, up, old, row_scale_ptr, scale_ptr, bias_ptr, out_ptr, rows, columns, M, N, out_stride,
    SCALED: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What follows the product, y (and up) [rows, columns]: scales, bias, gate, sum with `old`, store."""
    if SCALED:
        row_scale = tl.load(row_scale_ptr + rows, rows < M, 0.0)[:, None]
        y *= row_scale * tl.load(scale_ptr + columns, columns < N, 0.0)[None, :]
        if GATED:
            up *= row_scale * tl.load(scale_ptr + N + columns, columns < N, 0.0)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + columns, columns < N, 0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + N + columns, columns < N, 0.0).to(tl.float32)[None, :]
    if GATED:
        y = y * tl.sigmoid(y) * up
    if RESIDUAL:
        y += old.to(tl.float32)
    at = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(at, y.to(out_ptr.dtype.element_ty), (rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def _turned(acc, TALL: tl.constexpr):
    return tl.trans(acc) if TALL else acc


@triton.jit(do_not_specialize=["M", "prefetch"])
def _linear_kernel(
    x_desc, weight_desc, weight_ptr, row_scale_ptr, scale_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr,
    M, N, K, weight_stride, out_stride, prefetch,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    TALL: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, THREADS: tl.constexpr, LATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    first_m, first_n, share = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    steps = (tl.cdiv(K, BLOCK_K) + SPLIT - 1) // SPLIT
    begin = share * steps * BLOCK_K  # the last share may run past K, where the copy engine reads zeros
    if PDL:
        PARTS: tl.constexpr = THREADS // BLOCK_N if THREADS > BLOCK_N else 1
        UNIT: tl.constexpr = PARTS * 128 // weight_ptr.dtype.element_ty.primitive_bitwidth  # requests of 16 bytes
        columns = tl.minimum(prefetch, tl.minimum(steps * BLOCK_K, K - begin)) // UNIT * UNIT
        if columns > 0:
            _prefetch(weight_ptr, weight_stride, first_n, N, begin, columns, BLOCK_N, PARTS)
            if GATED:
                _prefetch(weight_ptr, weight_stride, N + first_n, 2 * N, begin, columns, BLOCK_N, PARTS)
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()
    rows, columns = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    old_at = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    in_tile = (rows < M)[:, None] & (columns < N)[None, :]
    EARLY: tl.constexpr = RESIDUAL and BLOCK_M * BLOCK_N <= 32 * THREADS
    # Sums to add to stay out of the L1 cache: of those who share a tile, another one writes the new ones.
    old = tl.load(old_at, in_tile, 0.0, cache_modifier=".cg") if EARLY else 0.0

    HEIGHT: tl.constexpr = BLOCK_N if TALL else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if TALL else BLOCK_N
    acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
    acc_up = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = begin + step * BLOCK_K
        x = x_desc.load([first_m, start])
        weight = weight_desc.load([first_n, start])
        if TALL:
            acc = tl.dot(weight, tl.trans(x), acc)
        else:
            acc = tl.dot(x, tl.trans(weight), acc)
        if GATED:
            weight_up = weight_desc.load([N + first_n, start])
            if TALL:
                acc_up = tl.dot(weight_up, tl.trans(x), acc_up)
            else:
                acc_up = tl.dot(x, tl.trans(weight_up), acc_up)

    if SPLIT == 1:
        if RESIDUAL and not EARLY:
            old = tl.load(old_at, in_tile, 0.0, cache_modifier=".cg")
        _outputs(
            _turned(acc, TALL), _turned(acc_up, TALL), old, row_scale_ptr, scale_ptr, bias_ptr, out_ptr, rows, columns,
            M, N, out_stride, SCALED, GATED, BIAS, RESIDUAL,
        )  # fmt: skip
        return
    AREA: tl.constexpr = BLOCK_M * BLOCK_N
    SIZE: tl.constexpr = 2 * AREA if GATED else AREA
    place = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    first = partial_ptr + tile.to(tl.int64) * SPLIT * SIZE
    mine = first + share * SIZE
    tl.store(mine + place, acc)
    if GATED:
        tl.store(mine + AREA + place, acc_up)
    if RESIDUAL and not EARLY:
        old = tl.load(old_at, in_tile, 0.0, cache_modifier=".cg")
    tl.debug_barrier()  # every thread's part is written before one of them says so
    if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
        tl.store(counter_ptr + tile, 0)
        acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
        acc_up = tl.zeros([HEIGHT, WIDTH], tl.float32)
        for i in tl.static_range(SPLIT):
            # Not through the L1 cache: other processors wrote this a moment ago.
            acc += tl.load(first + i * SIZE + place, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(first + i * SIZE + AREA + place, cache_modifier=".cg")
        _outputs(
            _turned(acc, TALL), _turned(acc_up, TALL), old, row_scale_ptr, scale_ptr, bias_ptr, out_ptr, rows, columns,
            M, N, out_stride, SCALED, GATED, BIAS, RESIDUAL,
        )  # fmt: skip


@cache
def _counters(device: torch.device, _stream: int) -> torch.Tensor:
    """The tiles' counters, for all products of a stream, which runs them one after another. They stay: graphs know
    where."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    gated: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    config: Tiles,
    scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    *,
    late: bool = False,
) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T + bias [n] → [m, n], summed in float32, m ≤ 128; in `out` if given, else in x's dtype.

    x and weight: bfloat16 or float16, rows contiguous and a multiple of 8 elements apart. norm_weight [k]: x is
    RMS-normed with it and eps on the way in. gated: weight [2n, k] and bias [2n] are [gate | up], the result
    silu(gate) · up. residual [m, n]: the result is added to it in place, rounded once, and it is returned.
    scale, row_scale: float32, of each line of the weight and of x, if both are of 8 bits; then rows are a multiple of
    16 elements apart, there is no norm, and `out` or a residual must be given. late: the next kernel starts once what
    comes before this one is there.
    Raises ValueError for other shapes, or if `config` needs more workspace than there is.
    """
    (m, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"batch linear takes 1 to {MAX_ROWS} rows, got {m}")
    unit = 8 if scale is None else 16
    if k % unit or x.stride(0) % unit or weight.stride(0) % unit:
        raise ValueError(f"rows must be a multiple of {unit} elements long and apart, got {k}, {x.stride(0)} and "
                         f"{weight.stride(0)}")  # fmt: skip
    if norm_weight is not None:
        x = norm.rms_norm(x, norm_weight, eps, early=True)
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (cdiv(m, config.block_m), cdiv(n, config.block_n), config.split)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    partial = counters = _counters(x.device, stream)
    if config.split > 1:
        elements = config.block_m * config.block_n * (2 if gated else 1) * grid[0] * grid[1] * config.split
        if elements > WORKSPACE or grid[0] * grid[1] > MAX_TILES:
            raise ValueError(f"{config} needs more workspace than there is for {m} rows and {n} outputs")
        partial = torch.empty(elements, dtype=torch.float32, device=x.device)
    pdl = has_pdl(x.device)
    _linear_kernel[grid](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        weight, weight if row_scale is None else row_scale, weight if scale is None else scale,
        weight if bias is None else bias, out, partial, counters,
        m, n, k, weight.stride(0), out.stride(0), config.prefetch,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT=config.split, TALL=config.tall,
        STAGES=config.num_stages, SCALED=scale is not None, GATED=gated,
        BIAS=bias is not None, RESIDUAL=residual is not None,
        THREADS=32 * config.num_warps, LATE=late, PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
