"""Rows to 8-bit floats with a scale each: as they are, behind an RMS norm, or behind a gate. One program a row. And
what a product of such rows left to do: its scales, and the sum with the residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import cdiv, has_pdl, next_power_of_2
from quire.kernels.triton.launches import launch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST = 1e-30  # a row of zeros has some scale
MAX_BLOCK = 16384  # columns that are held in registers; longer rows are read twice
COLUMNS = 1024  # of a program that adds


@triton.jit
def _columns(x_ptr, gain_ptr, columns, size, NORM: tl.constexpr, GATED: tl.constexpr):
    """Of a row, in float32; times the gain, or gated by those `size` before them."""
    mask = columns < size
    x = tl.load(x_ptr + columns, mask, 0.0).to(tl.float32)
    if GATED:
        x = x * tl.sigmoid(x) * tl.load(x_ptr + size + columns, mask, 0.0).to(tl.float32)
    y = x
    if NORM:
        y = x * tl.load(gain_ptr + columns, mask, 0.0).to(tl.float32)
    return x, y


@triton.jit
def _quantize_rows_kernel(
    x_ptr, gain_ptr, out_ptr, scale_ptr, wide_ptr, x_stride, size, eps, LARGEST, LEAST,
    BLOCK: tl.constexpr, ONE: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_ptr += row * x_stride
    out_ptr += row * size
    x, y = _columns(x_ptr, gain_ptr, columns, size, NORM, GATED)
    largest = tl.max(tl.abs(y), axis=0)
    squares = tl.sum(x * x, axis=0)
    if not ONE:
        for start in range(BLOCK, size, BLOCK):
            more_x, more = _columns(x_ptr, gain_ptr, start + columns, size, NORM, GATED)
            largest = tl.maximum(largest, tl.max(tl.abs(more), axis=0))
            squares += tl.sum(more_x * more_x, axis=0)
    scale = tl.maximum(largest, LEAST) / LARGEST
    factor = 1.0 / scale
    norm = 1.0
    if NORM:
        norm = tl.rsqrt(squares / size + eps)
        scale *= norm
    tl.store(scale_ptr + row, scale)
    narrow = tl.clamp(y * factor, -LARGEST, LARGEST).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + columns, narrow, columns < size)
    wide_ptr += row * size
    if WIDE:
        tl.store(wide_ptr + columns, (y * norm).to(wide_ptr.dtype.element_ty), columns < size)
    if not ONE:
        for start in range(BLOCK, size, BLOCK):
            _, more = _columns(x_ptr, gain_ptr, start + columns, size, NORM, GATED)
            narrow = tl.clamp(more * factor, -LARGEST, LARGEST).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + start + columns, narrow, start + columns < size)
            if WIDE:
                more = (more * norm).to(wide_ptr.dtype.element_ty)
                tl.store(wide_ptr + start + columns, more, start + columns < size)


def _quantize(
    x: torch.Tensor,
    size: int,
    gain: tuple[torch.Tensor, float] | None,
    gated: bool,
    wide: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    m = x.shape[0]
    out = torch.empty((m, size), dtype=E4M3, device=x.device)
    scale = torch.empty((m,), dtype=torch.float32, device=x.device)
    if m:
        weight, eps = gain or (x, 0.0)
        block, pdl = min(next_power_of_2(size), MAX_BLOCK), has_pdl(x.device)
        launch(_quantize_rows_kernel, (m,),
            x, weight, out, scale, x if wide is None else wide, x.stride(0), size, eps, LARGEST, LEAST, BLOCK=block,
            ONE=size <= block, NORM=gain is not None, GATED=gated, WIDE=wide is not None, PDL=pdl,
            num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return out, scale


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k], rows contiguous → e4m3 [m, k] and the float32 scale [m] that each row is to be multiplied by."""
    return _quantize(x, x.shape[1], None, False)


def rms_norm_quantize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rms_norm(x) · weight, which is rounded once."""
    return _quantize(x, x.shape[1], (weight, eps), False)


def rms_norm_both(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rms_norm(x) · weight as it is, and the same in 8 bits with scales."""
    wide = torch.empty_like(x, memory_format=torch.contiguous_format)
    return wide, *_quantize(x, x.shape[1], (weight, eps), False, wide)


def silu_and_mul_quantize(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of silu(gate) · up; gate_up [m, 2k], gate first."""
    return _quantize(gate_up, gate_up.shape[1] // 2, None, True)


@triton.jit
def _add_scaled_kernel(y_ptr, row_scale_ptr, scale_ptr, out_ptr, y_stride, out_stride, size, BLOCK: tl.constexpr,
                       PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    scale = tl.load(scale_ptr + columns, mask, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = out_ptr + row * out_stride + columns
    y = tl.load(y_ptr + row * y_stride + columns, mask, 0.0).to(tl.float32) * (tl.load(row_scale_ptr + row) * scale)
    tl.store(at, (y + tl.load(at, mask, 0.0).to(tl.float32)).to(out_ptr.dtype.element_ty), mask)


def add_scaled(y: torch.Tensor, row_scale: torch.Tensor, scale: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """`residual += y * row_scale * scale` in place, rounded once: y and residual [m, n], row_scale float32 [m], scale
    float32 [n]."""
    m, n = y.shape
    if m:
        pdl = has_pdl(y.device)
        launch(_add_scaled_kernel, (m, cdiv(n, COLUMNS)),
            y, row_scale, scale, residual, y.stride(0), residual.stride(0), n, BLOCK=COLUMNS, PDL=pdl, num_warps=4,
            launch_pdl=pdl,
        )  # fmt: skip
    return residual
