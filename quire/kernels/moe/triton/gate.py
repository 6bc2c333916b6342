"""A gate of one number a token. One program a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl


@triton.jit
def _sigmoid_gate_kernel(y_ptr, x_ptr, weight_ptr, y_stride, x_stride, N, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        inside = start + column < K
        x = tl.load(x_ptr + row * x_stride + start + column, inside, 0.0).to(tl.float32)
        acc += x * tl.load(weight_ptr + start + column, inside, 0.0).to(tl.float32)
    gate = tl.sigmoid(tl.sum(acc, axis=0))
    for start in range(0, N, BLOCK):
        inside = start + column < N
        at = y_ptr + row * y_stride + start + column
        tl.store(at, (tl.load(at, inside, 0.0).to(tl.float32) * gate).to(y_ptr.dtype.element_ty), inside)


def sigmoid_gate(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `quire.kernels.moe.gate`; rows contiguous."""
    if len(y):
        pdl = has_pdl(y.device)
        _sigmoid_gate_kernel[(len(y),)](
            y, x, weight, y.stride(0), x.stride(0), y.shape[1], x.shape[1], BLOCK=1024, PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
    return y
