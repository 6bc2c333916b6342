"""Any device that torch knows, in plain torch: GPUs of AMD (which torch calls cuda), Intel (xpu) and Apple (mps).

Here are no kernels, streams or graphs of ours. What a device tells of its memory differs; where it tells nothing, the
KV cache takes what the user says, or a share of the machine's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from quire.foundation.errors import ConfigError
from quire.platforms.cpu import CPUPlatform
from quire.types.ranks import ALONE, Rank

logger = logging.getLogger(__name__)


class TorchPlatform:
    name = "torch"
    plain_torch = True
    runs_ahead = False

    def __init__(self, what: str = "cpu") -> None:
        """what: torch's name of the device's type."""
        self._type = what or "cpu"
        self._host = CPUPlatform()
        self._device = torch.device("cpu")  # until it is set up

    def set_up(self, num_threads: int | None, rank: Rank = ALONE) -> torch.device:
        """Raises ConfigError if this torch has no such device, or none for this rank."""
        if self._type == "cpu":
            self._device = self._host.set_up(num_threads, rank)
            return self._device
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != self._type:
            there = "no accelerator" if found is None else f"torch:{found.type}"
            raise ConfigError(f"device=torch:{self._type}, but torch {torch.__version__} has {there} here", "device")
        if rank.place >= torch.accelerator.device_count():
            raise ConfigError(
                f"tensor_parallel_size={rank.size} needs as many devices, and there are "
                f"{torch.accelerator.device_count()}",
                "tensor_parallel_size",
            )
        torch.set_num_threads(num_threads or 1)  # the CPU only plans and launches here
        if rank.size > 1 or rank.device >= 0:
            torch.accelerator.set_device_index(rank.place)
        self._device = torch.empty(1, device=self._type).device  # creates the context as well
        self._module: Any = torch.get_device_module(self._device)
        self._tells = self._memory() is not None
        if not self._tells:
            logger.warning(
                "torch:%s does not tell its memory: a quarter of the machine's free memory counts as free; "
                "kv_cache_memory_bytes says it exactly", self._type
            )  # fmt: skip
        return self._device

    def device_name(self) -> str:
        if self._device.type == "cpu":
            return f"torch:{self._host.device_name()}"
        named = getattr(self._module, "get_device_name", None)
        return f"torch:{self._type}" + (f" ({named(self._device)})" if named else "")

    def free_bytes(self) -> int:
        if self._device.type == "cpu":
            return self._host.free_bytes()
        self._empty_cache()
        found = self._memory()
        return self._host.free_bytes() // 4 if found is None else found[0]

    def total_bytes(self) -> int:
        found = None if self._device.type == "cpu" else self._memory()
        return self._host.total_bytes() if found is None else found[1]

    def growth(self, work: Callable[[], object]) -> int:
        if self._device.type == "cpu":
            work()
            return 0
        self.release()
        before = self._held("memory_reserved", "driver_allocated_memory")
        if (reset := getattr(self._module, "reset_peak_memory_stats", None)) is not None:
            reset()
        work()
        torch.accelerator.synchronize()
        # Without a peak: what the allocator keeps of it all, which it has not given back yet.
        return max(0, self._held("max_memory_reserved", "driver_allocated_memory") - before)

    def release(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
            self._empty_cache()

    def _held(self, *names: str) -> int:
        """Bytes that the allocator has of the device, from the first of torch's functions that is there."""
        found = next((getattr(self._module, name) for name in names if hasattr(self._module, name)), None)
        return int(found()) if found else 0

    def _memory(self) -> tuple[int, int] | None:
        """(free, total) bytes; None: nobody tells."""
        if hasattr(self._module, "recommended_max_memory"):  # shared with the CPU: as much as the system recommends
            total = int(self._module.recommended_max_memory())
            return max(0, total - int(self._module.driver_allocated_memory())), total
        try:
            free, total = self._module.mem_get_info(self._device)
        except (AttributeError, RuntimeError):
            return None
        return int(free), int(total)

    def _empty_cache(self) -> None:
        if hasattr(self._module, "empty_cache"):
            self._module.empty_cache()
