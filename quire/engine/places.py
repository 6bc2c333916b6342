"""Where each of several cores runs: its share of the devices of this machine."""

from __future__ import annotations

import os

from quire.config.resolve import Resolved
from quire.foundation.cores import usable_cores

_VISIBLE, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


def environment_of(resolved: Resolved, core: int) -> dict[str, str]:
    """Variables that give core number `core` the next num_ranks GPUs, or its share of the CPU."""
    runtime = resolved.config.runtime
    ranks = runtime.num_ranks
    if runtime.data_parallel_size == 1:
        return {}
    if resolved.device.endswith("cuda"):
        given = os.environ.get(_VISIBLE)
        own = range(core * ranks, (core + 1) * ranks)
        names = [str(index) for index in own] if given is None else given.split(",")[own.start : own.stop]
        return {_VISIBLE: ",".join(names)}
    if runtime.num_threads is None and _THREADS not in os.environ:
        return {_THREADS: str(max(1, usable_cores() // (runtime.data_parallel_size * ranks)))}
    return {}
