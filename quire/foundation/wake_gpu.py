"""What a GPU needs before its first kernel and torch's import can hide: half a second that is not Python's."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from functools import partial

from quire.foundation.registry import load

# Named, not imported: only who computes loads them.
_COMPILERS = "quire.kernels.triton.compilers:begin_early"
_FINGERPRINT = "triton.runtime.cache:triton_key"
_LIBRARY = "triton.backends.nvidia.driver:CudaUtils"
_waking: list[threading.Thread] = []
_one_at_a_time = threading.Lock()


def wake_gpu(index: int = 0) -> list[threading.Thread]:
    """Start threads that create a GPU's primary context, begin what compiles kernels, take the Triton compiler's
    fingerprint and build its library.

    torch and Triton find all done. Errors are left to them, who meet and report them again.
    """
    works = (partial(_context, index), _compiler)
    threads = [threading.Thread(target=work, name="wake_gpu", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    _waking.extend(threads)
    return threads


def wait_until_awake() -> None:
    """Wait until it is: whoever builds the library at the same time would put it in the place of that one."""
    while _waking:
        _waking.pop().join()


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


def _compiler() -> None:
    """Of Triton. The fingerprint is part of every kernel's name in its cache, and is kept: a hash of the compiler,
    hundreds of megabytes. The library is what it talks to the driver with; at a first start that is compiled from C.

    A machine without the driver compiles nothing, and would load Triton for this alone: a second of processor time.
    """
    if _driver() is None:
        return
    with _one_at_a_time, suppress(Exception):
        load(_COMPILERS)()
        load(_FINGERPRINT)()
        library = load(_LIBRARY)
        if not hasattr(library, "instance"):  # once: made again, its descriptors are strangers to kernels there are
            library()
