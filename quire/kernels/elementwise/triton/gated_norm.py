"""Triton twins of `kernels/elementwise/gated_norm.py`: some whole parts of lines a program, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl, next_power_of_2

_NUMBERS = 1024  # a program, or one part if that has more


@triton.jit(do_not_specialize=["num_lines"])
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, num_lines, parts, width, gate_stride, weight_step, eps,
    NORM: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    line, column = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES), tl.arange(0, BLOCK)
    token, part = line // parts, line % parts
    there = (line < num_lines)[:, None] & (column < width)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:  # written long ago: read ahead of the wait
        weight = tl.load(weight_ptr + (part * weight_step)[:, None] + column[None, :], there, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = (line * width)[:, None] + column[None, :]
    y = tl.load(x_ptr + at, there, 0.0).to(tl.float32)
    gate_at = gate_ptr + (token * gate_stride + part * width)[:, None] + column[None, :]
    gate = tl.load(gate_at, there, 0.0).to(tl.float32)
    factor = (1.0 if SIGMOID else gate) / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        y *= factor
    if NORM:
        y *= tl.rsqrt(tl.sum(y * y, axis=1) / width + eps)[:, None] * weight
    if not GATE_FIRST:
        y *= factor
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), there)


def _run(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    width: int,
    *,
    gate_first: bool,
    sigmoid: bool,
) -> torch.Tensor:
    out = torch.empty_like(x)
    parts = x.shape[1] // width
    count, block = len(x) * parts, next_power_of_2(width)
    lines = max(_NUMBERS // block, 1)
    step = width if weight is not None and len(weight) > width else 0
    if count:
        pdl = has_pdl(x.device)
        _gated_norm_kernel[(-(-count // lines),)](
            x, gate, x if weight is None else weight, out, count, parts, width, gate.stride(0), step, eps,
            NORM=weight is not None, GATE_FIRST=gate_first, SIGMOID=sigmoid, LINES=lines, BLOCK=block,
            PDL=pdl, num_warps=min(max(lines * block // 256, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return out


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    width: int,
    gate_first: bool,
    sigmoid: bool,
) -> torch.Tensor:
    """See `quire.kernels.elementwise.gated_norm`."""
    return _run(x, gate, weight, eps, width, gate_first=gate_first, sigmoid=sigmoid)


def gate_only(x: torch.Tensor, gate: torch.Tensor, *, sigmoid: bool) -> torch.Tensor:
    """See `quire.kernels.elementwise.gated_norm`."""
    size = x.shape[1]
    return _run(x, gate, None, 0.0, _NUMBERS if size % _NUMBERS == 0 else size, gate_first=True, sigmoid=sigmoid)
