"""What the worker asks of the machine it runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from quire.types.ranks import ALONE, Rank


class Platform(Protocol):
    """A kind of device, found by its name (`PLATFORMS` in `config/devices.py`)."""

    name: str
    plain_torch: bool  # its kernels are plain torch, whatever the device
    runs_ahead: bool  # streams of its own, graphs, results that are read late: what torch.cuda has

    def __init__(self, what: str = "") -> None:
        """what: behind the colon, for a platform of several kinds of device."""
        ...

    def set_up(self, num_threads: int | None, rank: Rank = ALONE) -> torch.device:
        """Make this process ready to compute here.

        Args:
            num_threads: CPU threads; None: as many as serve it best.
            rank: which of several processes that share this machine it is.

        Raises:
            ConfigError: the device cannot be used.
        """
        ...

    def device_name(self) -> str:
        """For people: "NVIDIA H200", "cpu (2 threads)"."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that could be allocated now."""
        ...

    def total_bytes(self) -> int: ...

    def growth(self, work: Callable[[], object]) -> int:
        """Do `work`, which leaves nothing behind: bytes that its tensors take of the device meanwhile; 0 on a CPU, and
        where nobody tells."""
        ...

    def release(self) -> None:
        """Wait for the device, and give back what no tensor needs any more."""
        ...
