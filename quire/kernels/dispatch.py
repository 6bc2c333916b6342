"""Where a kernel runs: Triton for CUDA tensors, plain torch for all others."""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter: the kernels themselves, on CPU tensors


def on_triton(x: torch.Tensor) -> bool:
    return x.is_cuda or INTERPRETED
