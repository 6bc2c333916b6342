"""The CPU as a device: threads and memory, within the limits of this process's container."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from quire.foundation.cores import usable_cores
from quire.types.ranks import ALONE, Rank

_CGROUP = Path("/sys/fs/cgroup")


class CPUPlatform:
    name = "cpu"
    plain_torch = False
    runs_ahead = False

    def __init__(self, what: str = "") -> None:
        pass

    def set_up(self, num_threads: int | None, rank: Rank = ALONE) -> torch.device:
        # OMP_NUM_THREADS, where it is set, is what torch's own default says: never more than that.
        share = max(usable_cores() // rank.size, 1)
        torch.set_num_threads(num_threads or min(share, torch.get_num_threads()))
        return torch.device("cpu")

    def device_name(self) -> str:
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' if threads > 1 else ''})"

    def free_bytes(self) -> int:
        free = _meminfo("MemAvailable")
        limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
        return free if limit is None or used is None else max(0, min(free, limit - used))

    def growth(self, work: Callable[[], object]) -> int:
        work()
        return 0

    def release(self) -> None:
        pass

    def total_bytes(self) -> int:
        total, limit = _meminfo("MemTotal"), _cgroup_number("memory.max")
        return total if limit is None else min(total, limit)


def _cgroup_number(name: str) -> int | None:
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):
        return None  # no limit ("max"), or no such control


def _meminfo(key: str) -> int:
    """A line of /proc/meminfo in bytes; the physical memory where there is none."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
