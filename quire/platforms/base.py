"""What the worker asks of the machine it runs on."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.types.ranks import ALONE, Rank


class Platform(Protocol):
    name: str

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

    def driver_bytes(self) -> int:
        """Memory of the device that is taken by what is no tensor of this process; 0 where nobody tells."""
        ...

    def total_bytes(self) -> int: ...
