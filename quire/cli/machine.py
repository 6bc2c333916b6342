"""Facts about this machine, from the standard library and the GPU driver's own library. Nothing here imports torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    total: int  # bytes
    free: int  # bytes
    driver: str


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> tuple[list[Gpu], str | None]:
    """All NVIDIA GPUs, asked of the driver; none and the reason if it cannot be asked."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return [], "no NVIDIA driver found (libnvidia-ml.so.1)"
    if code := nvml.nvmlInit_v2():
        return [], f"the NVIDIA driver does not answer (nvml error {code}): is it loaded, does it match the kernel?"
    try:
        count, driver = ctypes.c_uint(), ctypes.create_string_buffer(96)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlSystemGetDriverVersion(driver, 96)
        return [_gpu(nvml, i, driver.value.decode()) for i in range(count.value)], None
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int, driver: str) -> Gpu:
    handle, name, sizes = ctypes.c_void_p(), ctypes.create_string_buffer(96), (ctypes.c_ulonglong * 3)()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, 96)
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(sizes))
    return Gpu(index, name.value.decode(), sizes[0], sizes[1], driver)


def torch_cuda_build() -> str | None:
    """The CUDA version that the installed torch was built for, read from its files."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / "version.py").exists():
        return None
    match = re.search(r"^cuda[^=]*=\s*'([^']+)'", (folder / "version.py").read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def memory() -> tuple[int, int]:
    """Total and free bytes of host memory that this process may use, its container's limit included."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (match := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        free = int(match[1]) * 1024
    limit, used = (_read_int(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return total, free


def cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hub_cache() -> Path:
    """Where downloads from the hub are kept."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def existing(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    return path if path.exists() else existing(path.parent)


def _read_int(file: str) -> int | None:
    try:
        text = Path(file).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
