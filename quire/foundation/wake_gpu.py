"""What a GPU needs before its first kernel and torch's import can hide: half a second that is not Python's."""

from __future__ import annotations

import ctypes
import threading
from functools import partial

from quire.foundation.errors import ConfigError
from quire.foundation.registry import load

_FINGERPRINT = "triton.runtime.cache:triton_key"  # named, not imported: only who computes loads it


def wake_gpu(index: int = 0) -> list[threading.Thread]:
    """Start threads that create a GPU's primary context and take the Triton compiler's fingerprint.

    torch and Triton find both done. Errors are left to them, who meet and report them again.
    """
    works = (partial(_context, index), _fingerprint)
    threads = [threading.Thread(target=work, name="wake_gpu", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def _context(index: int) -> None:
    driver = _driver()
    if driver is None:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # for as long as the process lives


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _fingerprint() -> None:
    """Part of every kernel's name in Triton's cache, which keeps it: a hash of the compiler, hundreds of megabytes.

    A machine without the driver compiles nothing, and would load Triton for this alone: a second of processor time.
    """
    if _driver() is None:
        return
    try:
        load(_FINGERPRINT)()
    except (ImportError, AttributeError, ConfigError):
        return
