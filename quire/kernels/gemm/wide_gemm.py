"""silu(x @ gate.T) * (x @ up.T) for the rows of prompts: the library would write both products, to be read again."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import INTERPRETED, on_cuda

MIN_ROWS = 1024
BUSY = 0.8  # share of the last round of tiles' processors, and of the tiles' rows, that must have something to do


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `gated` takes x [m, k] and weight [2n, k], and beats the library with a kernel behind it."""
    if not on_cuda(x) or not len(x) or x.dtype not in (torch.bfloat16, torch.float16) or INTERPRETED:
        return False
    from quire.kernels.triton import launch

    (m, k), n = x.shape, weight.shape[0] // 2
    # What the bulk copy engine needs.
    aligned = k % 8 == n % 8 == x.stride(0) % 8 == weight.stride(0) % 8 == 0
    if not aligned or not launch.has_gluon_sm90(x.device):
        return False
    from quire.kernels.gemm.triton import pipeline_sm90 as gemm_pipeline_sm90
    from quire.kernels.gemm.triton import wide_gemm_sm90

    wide_gemm_sm90.compile_once(x, weight)
    return m >= MIN_ROWS and gemm_pipeline_sm90.busy(m, 2 * n, x.device) >= BUSY


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [m, k], weight [2n, k] = [gate | up] → [m, n], for what it `pays` for; rounded once, at the end."""
    from quire.kernels.gemm.triton import wide_gemm_sm90

    return wide_gemm_sm90.gated(x, weight)
