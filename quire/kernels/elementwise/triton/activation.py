"""Gated activation: one program for a stretch of one token's columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, row_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = gate_up_ptr + token * row_stride + columns
    gate = tl.load(row, mask, 0.0).to(tl.float32)
    up = tl.load(row + size, mask, 0.0).to(tl.float32)
    tl.store(out_ptr + token * size + columns, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask)


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `quire.kernels.elementwise.activation`; into `out` [tokens, size], contiguous, if given."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        pdl = has_pdl(gate_up.device)
        _silu_and_mul_kernel[(num_tokens, -(-size // BLOCK))](
            gate_up, out, gate_up.stride(0), size, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out
