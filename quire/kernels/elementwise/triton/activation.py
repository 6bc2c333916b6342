"""Activations: one program for a stretch of one token's columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl
from quire.kernels.triton.launches import launch

BLOCK = 1024


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _gated_kernel(
    gate_up_ptr, out_ptr, row_stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = gate_up_ptr + token * row_stride + columns
    gate = tl.load(row, mask, 0.0).to(tl.float32)
    up = tl.load(row + size, mask, 0.0).to(tl.float32)
    if GELU:
        # 1 + tanh(y) is 2 sigmoid(2 y); y = sqrt(2 / pi) (x + 0.044715 x³).
        weight = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        weight = tl.sigmoid(gate)
    tl.store(out_ptr + token * size + columns, (gate * weight * up).to(out_ptr.dtype.element_ty), mask)


def _gated(gate_up: torch.Tensor, out: torch.Tensor | None, *, gelu: bool) -> torch.Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        pdl = has_pdl(gate_up.device)
        launch(_gated_kernel, (num_tokens, -(-size // BLOCK)),
            gate_up, out, gate_up.stride(0), size, GELU=gelu, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `quire.kernels.elementwise.activation`; into `out` [tokens, size], contiguous, if given."""
    return _gated(gate_up, out, gelu=False)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `quire.kernels.elementwise.activation`."""
    return _gated(gate_up, None, gelu=True)


@triton.jit
def _relu2_kernel(x_ptr, out_ptr, row_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.maximum(tl.load(x_ptr + token * row_stride + columns, mask, 0.0).to(tl.float32), 0.0)
    tl.store(out_ptr + token * size + columns, (x * x).to(out_ptr.dtype.element_ty), mask)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """See `quire.kernels.elementwise.activation`."""
    out, size = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, size)
    if len(rows):
        pdl = has_pdl(x.device)
        _relu2_kernel[(len(rows), -(-size // BLOCK))](
            rows, out, rows.stride(0), size, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out


@triton.jit
def _softcap_kernel(x_ptr, stride, size, cap, factor, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = x_ptr + row * stride + columns
    tl.store(at, cap * _tanh(tl.load(at, mask, 0.0) * factor), mask)


def softcap_(x: torch.Tensor, cap: float, scale: float) -> torch.Tensor:
    """See `quire.kernels.elementwise.activation`."""
    if len(x):
        pdl = has_pdl(x.device)
        _softcap_kernel[(len(x), -(-x.shape[1] // (4 * BLOCK)))](
            x, x.stride(0), x.shape[1], cap, scale / cap, BLOCK=4 * BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl
        )
    return x
