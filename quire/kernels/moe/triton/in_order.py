"""Rows of tokens copied into the order of the choices: for products whose rows the bulk copy engine fetches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.moe.tiling import Tiling
from quire.kernels.triton.launch import cdiv, has_pdl

COPIED = 1024  # columns of a row that a program copies


@triton.jit(do_not_specialize=["most"])
def _in_order_kernel(
    x_ptr, out_ptr, order_ptr, tiles_ptr, most, x_stride,
    K: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Ahead of the wait nothing is read: the table is the last kernel's own."""
    tile, row = tl.program_id(0), tl.program_id(1)
    k = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, count = tl.load(tiles_ptr + tile), tl.load(tiles_ptr + 2 * most + tile)
    if expert < 0:
        return
    if row >= count:
        return
    at = tl.load(tiles_ptr + most + tile) + row
    token = tl.load(order_ptr + at) // TOP_K
    x = tl.load(x_ptr + token.to(tl.int64) * x_stride + k, k < K, 0.0)
    tl.store(out_ptr + at.to(tl.int64) * K + k, x, k < K)


def in_order(x: torch.Tensor, tiling: Tiling, top_k: int) -> torch.Tensor:
    """x [tokens, k] → [choices, k] in the order of `tiling`; behind the last is anything."""
    order, tiles, rows = tiling
    k, pdl = x.shape[1], has_pdl(x.device)
    out = torch.empty((len(order), k), dtype=x.dtype, device=x.device)
    _in_order_kernel[(tiles.shape[1], rows, cdiv(k, COPIED))](
        x, out, order, tiles, tiles.shape[1], x.stride(0), K=k, TOP_K=top_k, BLOCK=COPIED, PDL=pdl,
        launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return out
