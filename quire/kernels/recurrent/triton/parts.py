"""What kernels over states share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import shared_bytes


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact for small ones too: log(u) · e / (u - 1) undoes the rounding of u = 1 + e."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, small)


@triton.jit
def place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr):
    """Where a row's state lies, whether there is one from before, and whether it is to be kept."""
    page = tl.load(pages_ptr + row * pages_stride).to(tl.int64)
    return page, tl.load(goes_on_ptr + row) != 0, tl.load(is_live_ptr + row) != 0


@triton.jit
def blank(
    out_ptr, stride, column, there, piece, first_piece_ptr, query_start_ptr, num_rows, num_tokens, CHUNK: tl.constexpr
):
    """Of pieces without tokens: they zero the padding behind the last row, so that what is nobody's stays finite.

    Pieces are the second axis of the grid: what lies side by side in memory is read side by side.
    """
    used, place = tl.load(first_piece_ptr + num_rows), tl.arange(0, CHUNK)
    end, every = tl.load(query_start_ptr + num_rows).to(tl.int64), (tl.num_programs(1) - used) * CHUNK
    for begin in range(end + (piece - used) * CHUNK, num_tokens, every):
        token = begin + place
        at = out_ptr + (token * stride)[:, None] + column[None, :]
        tl.store(at, 0.0, (token < num_tokens)[:, None] & there[None, :])


def precision(dtype: torch.dtype) -> str:
    """Of products in float32: exact ones for a model in float32, and for narrower types more than these have."""
    return "ieee" if dtype == torch.float32 else "tf32"


_MOST_STAGES = 3
_SPARE = 8 * 1024  # bytes of shared memory, for what is turned round and summed up there


def stages(device: torch.device, stage: int, others: int) -> int:
    """Pieces whose inputs are on their way: as shared memory holds, most seen to pay. stage, others: bytes of such
    inputs, and of all other operands."""
    return min(max((shared_bytes(device) - others - _SPARE) // stage, 1), _MOST_STAGES)
