"""Small arrays on their way to a device."""

from __future__ import annotations

import torch


def pins(device: torch.device) -> bool:
    """Whether copies from pinned memory run beside the host: torch.cuda's, which are AMD's GPUs too."""
    return device.type == "cuda"


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, without a wait where that can be: torch's pool of pinned memory keeps the
    source until the copy has read it."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True) if pins(device) else host.to(device)
