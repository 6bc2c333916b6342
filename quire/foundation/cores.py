"""The processor cores that this process may use, within the limits of its container."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Physical cores this process may run on: a second thread on a core adds no bandwidth and no matrix unit."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = {_core_of(cpu) for cpu in cpus}
    quota = _cgroup_quota()
    return max(1, min(len(cores), quota or len(cores)))


def _core_of(cpu: int) -> tuple[str, str]:
    """(package, core); the cpu itself where the kernel does not tell."""
    folder = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        return (folder / "physical_package_id").read_text().strip(), (folder / "core_id").read_text().strip()
    except OSError:
        return "cpu", str(cpu)


def _cgroup_quota() -> int | None:
    """CPU time allowed, in whole CPUs; None without a limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None
