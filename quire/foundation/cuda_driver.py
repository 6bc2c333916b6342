"""The NVIDIA driver, spoken to before torch is there."""

from __future__ import annotations

import ctypes
import threading


def wake() -> threading.Thread:
    """Create the first GPU's primary context in a thread: a quarter of a second that torch's import can hide.

    torch uses the primary context too. Errors are left to torch, which meets and reports them again.
    """
    thread = threading.Thread(target=_create_context, name="wake-cuda", daemon=True)
    thread.start()
    return thread


def _create_context() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # for as long as the process lives
