"""What a device can do at best: bytes a second that a copy moves, operations a second of a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Part of a device's name → as measured by hand; see docs/performance.md. Others are measured for a moment.
KNOWN = {"H200": (4.217e12, 747e12)}
COPIED = 1 << 26  # bytes: beyond what a CPU keeps close
SIDE = 768  # of the matrices
TIMES = 5  # the best of so many counts


def ceilings(name: str, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes a second, operations a second); 0, 0 if there is no room to measure."""
    for part, rates in KNOWN.items():
        if part in name:
            return rates
    try:
        source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        left = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
        copy = _best(lambda: target.copy_(source), device)
        multiply = _best(lambda: left @ left, device)
    except RuntimeError:  # out of memory, or a product that the device does not know
        return 0.0, 0.0
    return 2.0 * COPIED / copy, 2.0 * SIDE**3 / multiply


def _best(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds."""
    found = []
    for _ in range(TIMES):
        began = time.perf_counter()
        done = work()
        if device.type != "cpu":
            done.view(-1)[:1].cpu()  # waits for it, on whatever device
        found.append(time.perf_counter() - began)
    return max(min(found), 1e-9)
