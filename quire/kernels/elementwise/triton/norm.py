"""Norms: whole rows in registers, one a program; several where there are many, so that more is read at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl, next_power_of_2
from quire.kernels.triton.launches import launch

MANY = 1024  # rows, from which on a program takes ROWS of them, if they are no longer than MAX_BLOCK
ROWS, MAX_BLOCK = 4, 4096


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, size, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    weight = tl.load(weight_ptr + columns, mask, 0.0).to(tl.float32)  # written long ago: read ahead of the wait
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + columns, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(out_ptr + row * size + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_many_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, x_stride, size, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    there = (row < num_rows)[:, None] & mask[None, :]
    weight = tl.load(weight_ptr + columns, mask, 0.0).to(tl.float32)  # written long ago: read ahead of the wait
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + (row * x_stride)[:, None] + columns[None, :], there, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    y = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + (row * size)[:, None] + columns[None, :], y.to(out_ptr.dtype.element_ty), there)


@triton.jit
def _add_rms_norm_kernel(
    residual_ptr, x_ptr, weight_ptr, residual_stride, x_stride, size, eps, factor,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    weight = tl.load(weight_ptr + columns, mask, 0.0).to(tl.float32)  # written long ago: read ahead of the wait
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + columns, mask, 0.0).to(tl.float32)
    at = residual_ptr + row * residual_stride + columns
    residual = tl.load(at, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps) * factor
    tl.store(at, (residual + x * scale * weight).to(residual_ptr.dtype.element_ty), mask)


@triton.jit
def _rms_norm_pair_kernel(
    x_ptr, first_ptr, second_ptr, x_stride, eps,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j): part j of row i."""
    is_first = tl.program_id(1) == 0
    size = tl.where(is_first, FIRST, SECOND)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    weight_ptr = tl.where(is_first, first_ptr, second_ptr)
    weight = tl.load(weight_ptr + columns, mask, 0.0).to(tl.float32)  # written long ago: read ahead of the wait
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = x_ptr + tl.program_id(0).to(tl.int64) * x_stride + tl.where(is_first, 0, FIRST) + columns
    x = tl.load(at, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(at, (x * scale * weight).to(x_ptr.dtype.element_ty), mask)


@triton.jit
def _layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, size, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    if WEIGHT:  # written long ago: read ahead of the wait
        weight = tl.load(weight_ptr + columns, mask, 0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + columns, mask, 0.0).to(tl.float32)
    x = tl.where(mask, x - tl.sum(x, axis=0) / size, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    if WEIGHT:
        y *= weight
    if BIAS:
        y += bias
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, early: bool = False) -> torch.Tensor:
    """See `quire.kernels.elementwise.norm`; early: the next kernel may start before this one waits (`launch`)."""
    size = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = rows.shape[0]
    if not count:
        return out
    block = next_power_of_2(size)
    pdl = has_pdl(x.device)
    if count >= MANY and block <= MAX_BLOCK:
        launch(_rms_norm_many_kernel, (-(-count // ROWS),),
            rows, weight, out, count, rows.stride(0), size, eps, ROWS=ROWS, BLOCK=block, PDL=pdl, num_warps=4,
            launch_pdl=pdl,
        )  # fmt: skip
        return out
    launch(_rms_norm_kernel, (count,),
        rows, weight, out, rows.stride(0), size, eps, BLOCK=block, EARLY=early, PDL=pdl,
        num_warps=min(max(block // 256, 1), 16), launch_pdl=pdl,
    )  # fmt: skip
    return out


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float
) -> torch.Tensor:
    """See `quire.kernels.elementwise.norm`."""
    rows, size = x.shape
    if rows:
        block, pdl = next_power_of_2(size), has_pdl(x.device)
        launch(_add_rms_norm_kernel, (rows,),
            residual, x, weight, residual.stride(0), x.stride(0), size, eps, scale, BLOCK=block, PDL=pdl,
            num_warps=min(max(block // 256, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return residual


def rms_norm_pair(x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], eps: float) -> torch.Tensor:
    """See `quire.kernels.elementwise.norm`."""
    if len(x):
        sizes = [len(weight) for weight in weights]
        block, pdl = next_power_of_2(max(sizes)), has_pdl(x.device)
        launch(_rms_norm_pair_kernel, (len(x), 2),
            x, *weights, x.stride(0), eps, FIRST=sizes[0], SECOND=sizes[1], BLOCK=block, PDL=pdl,
            num_warps=min(max(block // 256, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return x


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `quire.kernels.elementwise.norm`."""
    size = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        block, pdl = next_power_of_2(size), has_pdl(x.device)
        launch(_layer_norm_kernel, (len(rows),),
            rows, x if weight is None else weight, x if bias is None else bias, out, rows.stride(0), size, eps,
            WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=block, PDL=pdl,
            num_warps=min(max(block // 256, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return out
