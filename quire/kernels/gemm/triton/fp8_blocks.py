"""What the library's product of 8-bit floats with scales for every 128 columns wants, in one kernel: rows in 8 bits, as
they are or behind an RMS norm, and the weight's scales column after column, in which they do not lie for other kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.codes import BLOCK
from quire.kernels.triton.launch import cdiv, has_pdl, next_power_of_2

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST = 1e-30  # a block of zeros has some scale
COLUMNS = 2048  # of a program, where no norm wants the whole row
LINES = 32  # of the weight, whose scales a program turns


@triton.jit(do_not_specialize=["M", "ROWS"])
def _round_blocks_kernel(
    x_ptr, gain_ptr, out_ptr, scale_ptr, old_ptr, new_ptr, M, ROWS, N, x_stride, size, blocks, eps, LARGEST, LEAST,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, BLOCKS: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j), i < M: blocks PARTS * j … of row i; of those behind (i, 0): LINES lines of the weight."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if row >= M:
        line = (row - M) * LINES + tl.arange(0, LINES)
        block = tl.arange(0, BLOCKS)
        there = (line < N)[:, None] & (block < blocks)[None, :] & (tl.program_id(1) == 0)
        scales = tl.load(old_ptr + line[:, None] * blocks + block[None, :], there, 0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        tl.store(new_ptr + block[None, :] * N + line[:, None], scales, there)
        return
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    columns = part[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < size
    if NORM:
        gain = tl.load(gain_ptr + columns, inside, 0.0).to(tl.float32)  # written long ago: read ahead of the wait
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + columns, inside, 0.0).to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / size + eps) * gain
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST) / LARGEST
    narrow = tl.clamp(x / scale[:, None], -LARGEST, LARGEST).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * size + columns, narrow, inside)
    tl.store(scale_ptr + part * ROWS + row, scale, part < blocks)


def prepared(
    x: torch.Tensor, norm: tuple[torch.Tensor, float] | None, rows: int, weight_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [m, k], behind an RMS norm or as it is → e4m3 [rows, k] and float32 scales [blocks, rows], of which the first m
    rows are written; and weight_scale float32 [n, blocks], contiguous, as [blocks, n]. k: whole blocks."""
    (m, k), (n, blocks) = x.shape, weight_scale.shape
    out = torch.empty((rows, k), dtype=E4M3, device=x.device)
    scale = torch.empty((blocks, rows), dtype=torch.float32, device=x.device)
    turned = torch.empty((blocks, n), dtype=torch.float32, device=x.device)
    gain, eps = norm or (x, 0.0)
    columns, pdl = next_power_of_2(k) if norm else COLUMNS, has_pdl(x.device)
    _round_blocks_kernel[(m + cdiv(n, LINES), cdiv(k, columns))](
        x, gain, out, scale, weight_scale, turned, m, rows, n, x.stride(0), k, blocks, eps, LARGEST, LEAST,
        BLOCK=BLOCK, PARTS=columns // BLOCK, LINES=LINES, BLOCKS=next_power_of_2(blocks), NORM=norm is not None,
        PDL=pdl, num_warps=min(max(columns // 512, 4), 16), launch_pdl=pdl,
    )  # fmt: skip
    return out, scale, turned
