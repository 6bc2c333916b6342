"""Where a model may run: the platforms by name, and what "auto" stands for on this machine.

A device is `PLATFORM`, or `PLATFORM:WHAT` for a platform that has several kinds of device (`torch:mps`). Everything
here is asked of the system, not of torch, which the engine's front has no use for.
"""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version

from quire.foundation.errors import ConfigError
from quire.foundation.registry import Registry

PLATFORMS = Registry(
    "platform",
    {
        "cuda": "quire.platforms.cuda:CUDAPlatform",
        "cpu": "quire.platforms.cpu:CPUPlatform",
        "torch": "quire.platforms.any_torch:TorchPlatform",
    },
    contract="quire.platforms.base:Platform",
    needs=("set_up", "device_name", "free_bytes", "total_bytes", "growth", "release"),
    is_class=True,
)
_FOUND = {"cuda": "an NVIDIA GPU was found", "cpu": "no accelerator was found"}


def platform_of(device: str) -> str:
    return device.partition(":")[0]


def runs_on_cpu(device: str) -> bool:
    return device in ("cpu", "torch:cpu")


def resolve_device(wanted: str, notes: list[str]) -> str:
    """`PLATFORM`, or `PLATFORM:WHAT`.

    Raises:
        ConfigError: there is no such platform, or no such device.
    """
    name, _, what = wanted.partition(":")
    if wanted == "auto":
        return _noted(_best(), notes)
    if name == "gpu":
        raise ConfigError(
            "there is no device 'gpu': NVIDIA GPUs are cuda, others torch:TYPE; auto finds them", "device"
        )
    PLATFORMS.check(name, "device")
    if name == "torch" and not what:
        best = _best()
        return _noted(best if best.startswith("torch:") else f"torch:{best}", notes)
    if name in ("cuda", "cpu") and what:
        raise ConfigError(f"device={wanted}: {name} has no kinds; use {name}, {_ONE_OF_SEVERAL}", "device")
    if name == "torch" and not re.fullmatch("[a-z]+", what):
        raise ConfigError(f"device={wanted}: expected torch:TYPE with torch's name of it; {_ONE_OF_SEVERAL}", "device")
    if name == "cuda" and not has_gpu():
        raise ConfigError("device=cuda, but no NVIDIA GPU and driver were found; use device=cpu", "device")
    return wanted


_ONE_OF_SEVERAL = "and choose one of several devices with CUDA_VISIBLE_DEVICES or its like"


def _noted(device: str, notes: list[str]) -> str:
    notes.append(f"device={device}: {_FOUND.get(device.removeprefix('torch:'), 'torch was built for it')}")
    return device


def _best() -> str:
    return "cuda" if has_gpu() else f"torch:{other}" if (other := other_accelerator()) else "cpu"


def has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not glob.glob("/dev/nvidia[0-9]*"):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def other_accelerator() -> str | None:
    """torch's name of an accelerator that is no NVIDIA GPU, if its build is for one that is there.

    Builds for AMD's and Intel's GPUs say so in their version; others have to be asked for by name.
    """
    if platform.system() == "Darwin":
        return "mps" if platform.machine() == "arm64" else None
    try:
        build = version("torch").partition("+")[2]
    except PackageNotFoundError:
        return None
    if build.startswith(("rocm", "hip")) and os.path.exists("/dev/kfd"):
        return "cuda"  # so torch calls them
    if build.startswith("xpu") and glob.glob("/dev/dri/renderD*"):
        return "xpu"
    return None
