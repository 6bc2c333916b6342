"""x @ weight[expert].T for choices ordered by expert, in tiles: gate and up with the gate, or down with the weights of
the choices.

A program owns BLOCK_N outputs of one tile of choices, all of one expert. The table of tiles is the device's own, so the
grid has room for the most tiles there can be, and those that are none leave at once. Tiles of the weight come through
the bulk copy engine, several deep; with few rows the weight is the tall operand of the matrix units.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.gemm.triton.fp8_rows import LARGEST, LEAST
from quire.kernels.gemm.triton.fp8_widen import widened
from quire.kernels.moe.inside import Gate
from quire.kernels.moe.tiling import Tiling
from quire.kernels.moe.triton.inside import gated, squared
from quire.kernels.moe.triton.plan import HEIGHTS, Tiles, of_rows
from quire.kernels.triton.descriptors import described
from quire.kernels.triton.launch import cdiv, has_pdl, next_power_of_2
from quire.kernels.triton.launches import launch


class GroupedInside(NamedTuple):
    """bias [experts, 2n or n]; gate: behind gate and up alone.

    x_scale, float32: of x in 8 bits, [tokens]; or of what gate and up made, [choices, units], each of `unit` columns,
    which they leave in out_scale.
    """

    bias: torch.Tensor | None = None
    gate: Gate = Gate()
    x_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    unit: int = 0


COMBINED = 1024  # columns of a token that a program adds up
_built: set[tuple[object, ...]] = set()  # what the kernels were compiled for


@triton.jit
def _tile(desc, ptr, first, k, LINES: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, num_lines,
          BULK: tl.constexpr):  # fmt: skip
    """[LINES, COLUMNS] of a matrix [num_lines, K], zeros outside of it."""
    if BULK:
        return desc.load([first, k])
    line, column = first + tl.arange(0, LINES), k + tl.arange(0, COLUMNS)
    inside = (line < num_lines)[:, None] & (column < K)[None, :]
    return tl.load(ptr + line.to(tl.int64)[:, None] * K + column[None, :], inside, 0.0)


@triton.jit
def _dot(x, weight, acc, TALL: tl.constexpr, PRECISION: tl.constexpr):
    if TALL:
        acc = tl.dot(widened(weight, x), tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(widened(weight, x)), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_choices", "most"])
def _grouped_kernel(
    x_ptr, x_desc, x_scale_ptr, weight_ptr, weight_desc, scale_ptr, share_ptr, out_ptr, out_scale_ptr, order_ptr,
    tiles_ptr, num_choices, most, bias_ptr, num_lines, x_stride,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, TALL: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    BULK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, SHIFT: tl.constexpr, SQUARED: tl.constexpr, NARROW: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """GATED: x are the tokens, looked up by choice; out is in the order of the choices. Else x is what that made, and
    out is by choice, times its share. NARROW: x and what gate and up make are of 8 bits, with a scale a token, and one
    for each UNIT columns of a choice, which are BLOCK_N outputs of gate and up."""
    first_n, tile = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    LINES: tl.constexpr = 2 * N if GATED and not SQUARED else N
    if PDL and GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Of the product down this is ahead of the wait: the one before has waited for who made the table, ere this began.
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        if PDL and not GATED:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        return
    begin, count = tl.load(tiles_ptr + most + tile), tl.load(tiles_ptr + 2 * most + tile)
    row = tl.arange(0, ROWS)
    there = row < count
    line = expert * LINES + first_n
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + k[None, :]
    choice = tl.load(order_ptr + begin + row, there, 0)
    if PDL and not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if GATED:
        x_at += (choice // TOP_K).to(tl.int64)[:, None] * x_stride

    HEIGHT: tl.constexpr = BLOCK_N if TALL else ROWS
    WIDTH: tl.constexpr = ROWS if TALL else BLOCK_N
    acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
    acc_up = tl.zeros([HEIGHT, WIDTH], tl.float32)
    UNITS: tl.constexpr = (K + UNIT - 1) // UNIT
    scale_at = x_scale_ptr + (begin + row) * UNITS
    token_scale = tl.zeros([ROWS], tl.float32)
    if NARROW and GATED:
        token_scale = tl.load(x_scale_ptr + choice // TOP_K, there, 0.0)
    for step in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        start = step * BLOCK_K
        if NARROW and not GATED:
            # What its scales are of is multiplied by itself.
            for part in tl.static_range(0, BLOCK_K, UNIT):
                x = _tile(x_desc, x_ptr, begin, start + part, ROWS, UNIT, K, num_choices, BULK)
                weight = _tile(weight_desc, weight_ptr, line, start + part, BLOCK_N, UNIT, K, num_lines, BULK)
                unit = (start + part) // UNIT + tl.zeros([ROWS], tl.int32)
                unit_scale = tl.load(scale_at + unit, there & (unit < UNITS), 0.0)
                y = _dot(x, weight, tl.zeros([HEIGHT, WIDTH], tl.float32), TALL, PRECISION)
                acc += y * (unit_scale[None, :] if TALL else unit_scale[:, None])
        else:
            weight = _tile(weight_desc, weight_ptr, line, start, BLOCK_N, BLOCK_K, K, num_lines, BULK)
            if GATED:
                if K % BLOCK_K == 0:
                    x = tl.load(x_at + start, there[:, None], 0.0)
                else:
                    x = tl.load(x_at + start, there[:, None] & (start + k < K)[None, :], 0.0)
                if not SQUARED:
                    weight_up = _tile(weight_desc, weight_ptr, line + N, start, BLOCK_N, BLOCK_K, K, num_lines, BULK)
                    acc_up = _dot(x, weight_up, acc_up, TALL, PRECISION)
            else:
                x = _tile(x_desc, x_ptr, begin, start, ROWS, BLOCK_K, K, num_choices, BULK)
            acc = _dot(x, weight, acc, TALL, PRECISION)
    y = tl.trans(acc) if TALL else acc
    n = first_n + tl.arange(0, BLOCK_N)
    in_n = n < N
    if NARROW and GATED:
        y *= token_scale[:, None]
    if SCALED:
        y *= tl.load(scale_ptr + expert * LINES + n, in_n, 0.0)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + expert * LINES + n, in_n, 0.0).to(tl.float32)[None, :]
    if GATED and SQUARED:
        y = squared(y)
        place = begin + row
    elif GATED:
        up = tl.trans(acc_up) if TALL else acc_up
        if NARROW:
            up *= token_scale[:, None]
        if SCALED:
            up *= tl.load(scale_ptr + expert * LINES + N + n, in_n, 0.0)[None, :]
        if BIAS:
            up += tl.load(bias_ptr + expert * LINES + N + n, in_n, 0.0).to(tl.float32)[None, :]
        y = gated(y, up, ALPHA, LIMIT, SHIFT)
        place = begin + row
    else:
        y *= tl.load(share_ptr + choice, there, 0.0)[:, None]
        place = choice
    if NARROW and GATED:
        BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
        narrow = tl.maximum(tl.max(tl.abs(tl.where(in_n[None, :], y, 0.0)), axis=1), LEAST) / LARGEST
        tl.store(out_scale_ptr + place * BLOCKS + tl.program_id(0), narrow, there)
        y = tl.clamp(y / narrow[:, None], -LARGEST, LARGEST)
    out_at = out_ptr + place.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), there[:, None] & in_n[None, :])


@triton.jit
def _combine_kernel(
    parts_ptr, experts_ptr, residual_ptr, residual_stride,
    N: tl.constexpr, TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Ahead of the wait is read what the products have waited for: this began behind their waits."""
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, TOP_BLOCK)
    there = tl.load(experts_ptr + token * TOP_K + place, place < TOP_K, -1) >= 0  # else another rank's, or nobody's
    out = residual_ptr + token * residual_stride + n
    before = tl.zeros([BLOCK], tl.float32)
    if ADD:
        before = tl.load(out, n < N, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = parts_ptr + (token * TOP_K + place)[:, None] * N + n[None, :]
    parts = tl.load(at, there[:, None] & (n < N)[None, :], 0.0).to(tl.float32)
    tl.store(out, (before + tl.sum(parts, axis=0)).to(residual_ptr.dtype.element_ty), n < N)


def grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    share: torch.Tensor | None,
    out: torch.Tensor,
    tiling: Tiling,
    top_k: int,
    inside: GroupedInside,
    config: Tiles,
    *,
    bulk: bool,
    compile_only: bool = False,
) -> torch.Tensor:
    """Without `share`: x [tokens, k] → out [choices, n] in the order of `tiling`, behind the gate. With it, float32
    [choices]: x [choices, k] in that order → out [choices, n], each where its choice is, times its share.

    weight: [experts, 2n or n, k], contiguous. inside: its bias, and the gate behind it. bulk: its lines,
    and those of x, can be read by the copy engine.
    """
    experts, lines, k = weight.shape
    gated = share is None
    n = lines // 2 if gated and not inside.gate.squared else lines
    most = tiling.tiles.shape[1]
    pdl = has_pdl(x.device)
    unit = inside.unit or config.block_k  # columns that the copy engine fetches at a time
    weight_desc, x_desc = weight, x
    if bulk:
        weight_desc = described(TensorDescriptor, weight.view(experts * lines, k), (config.block_n, unit))
    if bulk and not gated:
        x_desc = described(TensorDescriptor, x, (config.rows, unit))
    grid = (cdiv(n, config.block_n), most)
    run = partial(_grouped_kernel.warmup, grid=grid) if compile_only else partial(launch, _grouped_kernel, grid)
    run(
        x, x_desc, weight if inside.x_scale is None else inside.x_scale, weight, weight_desc,
        weight if scale is None else scale, weight if share is None else share, out,
        weight if inside.out_scale is None else inside.out_scale, tiling.order, tiling.tiles, len(tiling.order), most,
        weight if inside.bias is None else inside.bias, experts * lines, x.stride(0),
        N=n, K=k, TOP_K=top_k, ROWS=config.rows, BLOCK_N=config.block_n, BLOCK_K=config.block_k, STAGES=config.stages,
        TALL=config.tall, GATED=gated, SCALED=scale is not None, BULK=bulk,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PDL=pdl, BIAS=inside.bias is not None,
        ALPHA=inside.gate.alpha, LIMIT=inside.gate.limit, SHIFT=inside.gate.shift,
        SQUARED=inside.gate.squared, NARROW=inside.x_scale is not None, LARGEST=LARGEST, LEAST=LEAST,
        UNIT=unit, num_warps=config.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def compile_once(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    share: torch.Tensor | None,
    out: torch.Tensor,
    tiling: Tiling,
    top_k: int,
    inside: GroupedInside,
    *,
    bulk: bool,
) -> None:
    """All that any number of tokens will need: nothing is compiled in mid-service."""
    kind = (
        x.device, x.dtype, weight.dtype, weight.shape, share is None, top_k, inside.bias is None, inside.gate
    )  # fmt: skip
    if kind in _built or INTERPRETED:
        return
    _built.add(kind)
    for rows in HEIGHTS:
        how = of_rows(rows, max(weight.itemsize, x.itemsize))
        config = how.gate_up if share is None else how.down
        of = inside._replace(unit=how.gate_up.block_n if inside.unit else 0)
        grouped(x, weight, scale, share, out, tiling, top_k, of, config, bulk=bulk, compile_only=True)


def combine(parts: torch.Tensor, experts: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """residual [tokens, n] += the sum over top_k of parts [tokens · top_k, n], in place, rounded once; where
    experts [tokens, top_k] is -1 there is no part. Returns it; without a residual, the sum alone."""
    tokens, top_k = experts.shape
    n = parts.shape[1]
    out = torch.empty((tokens, n), dtype=parts.dtype, device=parts.device) if residual is None else residual
    pdl = has_pdl(parts.device)
    launch(_combine_kernel, (tokens, cdiv(n, COMBINED)),
        parts, experts, out, out.stride(0), N=n, TOP_K=top_k, TOP_BLOCK=next_power_of_2(top_k), BLOCK=COMBINED,
        ADD=residual is not None, PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return out
