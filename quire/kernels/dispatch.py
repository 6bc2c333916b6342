"""Which implementation of a kernel runs; nowhere else is that decided.

Triton for CUDA tensors, torch in the way that suits a CPU for its tensors, plain torch for all others. A platform that
is about plain torch does all its work inside of `plain_torch`, and then that runs on any device: so a GPU shows what
devices do that Triton knows nothing of.
"""

from __future__ import annotations

import os
from contextvars import ContextVar

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter: the kernels themselves, on CPU tensors

_plain: ContextVar[bool] = ContextVar("quire_plain_torch", default=False)


class plain_torch:  # noqa: N801 (used like a function)
    """`with plain_torch():` in this thread every kernel is plain torch whatever the device. on: False undoes it."""

    __slots__ = ("_on", "_token")

    def __init__(self, on: bool = True) -> None:
        self._on = on

    def __enter__(self) -> None:
        self._token = _plain.set(self._on)

    def __exit__(self, *_: object) -> None:
        _plain.reset(self._token)


def on_triton(x: torch.Tensor) -> bool:
    return (x.is_cuda or INTERPRETED) and not _plain.get()


def on_cuda(x: torch.Tensor) -> bool:
    """Whether Triton's kernels run compiled: what its interpreter does not know may be used as well."""
    return x.is_cuda and not _plain.get()


def on_cpu(x: torch.Tensor) -> bool:
    """Whether what is made for CPUs runs, where Triton does not."""
    return x.is_cpu and not _plain.get()


def device_on_triton(device: torch.device) -> bool:
    """`on_triton` of the tensors there."""
    return (device.type == "cuda" or INTERPRETED) and not _plain.get()


def device_on_cuda(device: torch.device) -> bool:
    """`on_cuda` of the tensors there."""
    return device.type == "cuda" and not _plain.get()
