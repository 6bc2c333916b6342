"""Whether so many engine cores have room side by side in this machine."""

from __future__ import annotations

from quire.config.hardware import Hardware
from quire.config.parallel.ranks import num_gpus
from quire.config.runtime import RuntimeConfig
from quire.foundation.errors import ConfigError

_OPTION = "data_parallel_size"
MAX_CORES = 64
ELSEWHERE = ("ray", "external")  # executors whose ranks may be on other machines …
ANY_NUMBER = 1 << 16  # … of which this one does not know how many GPUs they have


def gpus_for(runtime: RuntimeConfig, hardware: Hardware | None) -> int | None:
    """GPUs that ranks may have; None: as many as this machine has."""
    if runtime.distributed_executor_backend in ELSEWHERE:
        return ANY_NUMBER
    return None if hardware is None else hardware.count


def check_cores(runtime: RuntimeConfig, device: str, gpus: int | None = None) -> None:
    """gpus: that there are; None: in this machine. Raises ConfigError."""
    size, ranks = runtime.data_parallel_size, runtime.num_ranks
    if not 1 <= size <= MAX_CORES:
        raise ConfigError(f"{_OPTION} must be in [1, {MAX_CORES}], got {size}", _OPTION)
    if size == 1:
        return
    if device not in ("cuda", "cpu", "torch:cuda", "torch:cpu"):
        raise ConfigError(f"{_OPTION}={size}: {device} cannot be shared out among cores, it must be 1", _OPTION)
    gpus = num_gpus() if gpus is None and device == "cuda" else gpus
    if device == "cuda" and gpus is not None and size * ranks > gpus:
        each = f" of {ranks} each" if ranks > 1 else ""
        raise ConfigError(f"{_OPTION}={size} needs {size * ranks} GPUs{each}, and this process may use {gpus}", _OPTION)
