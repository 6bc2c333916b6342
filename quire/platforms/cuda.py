"""One NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.foundation.errors import ConfigError
from quire.types.ranks import ALONE, Rank


class CUDAPlatform:
    name = "cuda"
    plain_torch = False
    runs_ahead = True

    def __init__(self, what: str = "") -> None:
        pass

    def set_up(self, num_threads: int | None, rank: Rank = ALONE) -> torch.device:
        """Raises ConfigError if torch was built without CUDA, the driver does not answer, or there is no GPU for this
        rank."""
        if torch.version.cuda is None:
            raise ConfigError(f"device=cuda, but torch {torch.__version__} was built without CUDA", "device")
        if not torch.cuda.is_available():
            raise ConfigError("device=cuda, but the NVIDIA driver offers no usable GPU", "device")
        torch.set_num_threads(num_threads or 1)  # the CPU only plans and launches here
        if rank.place >= torch.cuda.device_count():
            raise ConfigError(
                f"tensor_parallel_size={rank.size} needs as many GPUs, and this process may use "
                f"{torch.cuda.device_count()}",
                "tensor_parallel_size",
            )
        index = torch.cuda.current_device() if rank.size == 1 and rank.device < 0 else rank.place
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        torch.empty(1, device=self._device)  # creates the context, whose memory is then not counted as free
        return self._device

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def free_bytes(self) -> int:
        """What the driver has left. torch's allocator gives back what it holds whole; pieces of what is in use serve
        only who wants little."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def growth(self, work: Callable[[], object]) -> int:
        self.release()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before

    def release(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]
