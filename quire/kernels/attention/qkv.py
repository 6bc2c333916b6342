"""From the residual to attention's inputs: norm, qkv product, per-head norm, rotary embedding, write to the cache.

Few rows are two kernels, each the best at what it does (`linear` and `rope`). For the rows of prompts the first would
write q, k and v only for the second to read them again: there one kernel does all but the first norm.
"""

from __future__ import annotations

import torch

from quire.kernels.attention.rope import QkvTarget, qk_norm_rope_write
from quire.kernels.dispatch import INTERPRETED, on_cuda
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm import in_parts
from quire.kernels.gemm.linear import linear

MIN_ROWS = 1024
BUSY = 0.8  # share of the last round of tiles' processors, and of the tiles' rows, that must have something to do


def qkv_rope_write(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    place: QkvTarget,
) -> torch.Tensor:
    """x [tokens, hidden] → rotated q [tokens, num_heads, head_dim]; k and v go to their slots in the cache.

    weight [(num_heads + 2 * num_kv_heads) * head_dim, hidden] and bias: q's, k's and v's lines. norm: (weight [hidden],
    eps) of the RMS norm that x goes through first. Neither weights nor positions nor slots may be written by a kernel
    launched just before: they are read ahead of its end.
    """
    if _in_one(x, weight, bias, place):
        from quire.kernels.attention.triton import qkv_sm90

        return qkv_sm90.qkv_rope_write(x if norm is None else rms_norm(x, *norm), weight, bias, place)
    parts = 1 if bias is not None else in_parts.parts_to_rotate(x, weight)
    if parts > 1:
        return qk_norm_rope_write(in_parts.linear(x if norm is None else rms_norm(x, *norm), weight, parts), *place)
    return qk_norm_rope_write(linear(x, weight, bias, norm=norm), *place)


def _in_one(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: QkvTarget) -> bool:
    """Whether there is a kernel for all of it that beats two."""
    if (
        not on_cuda(x)
        or not len(x)
        or x.dtype not in (torch.bfloat16, torch.float16)
        or INTERPRETED
        or place.interleaved
        or place.norm_last
    ):
        return False
    from quire.kernels.triton import launch

    (m, k), n = x.shape, len(weight)
    # What the bulk copy engine needs.
    aligned = k % 8 == x.stride(0) % 8 == weight.stride(0) % 8 == 0
    if not aligned or not place.cos_sin.is_contiguous() or not launch.has_gluon_sm90(x.device):
        return False
    from quire.kernels.attention.triton import qkv_sm90
    from quire.kernels.gemm.triton import pipeline_sm90 as gemm_pipeline_sm90

    if not qkv_sm90.takes(place.head_dim, place.cos_sin.shape[1], place.k_cache.shape[2]):
        return False
    qkv_sm90.compile_once(x, weight, bias, place)
    return m >= MIN_ROWS and gemm_pipeline_sm90.busy(m, n, x.device) >= BUSY
