"""Many kernels compiled at once: launches are noted while a step is rehearsed, and compiled by threads.

Triton compiles a kernel when it is first launched: one after the other, about half a second each with its C launcher.
Nearly all of that happens outside the interpreter's lock or in other processes (ptxas, the C compiler), so threads
share it well. Every variant that the rehearsed step would launch is found this way; nobody keeps a list.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
import triton

_MAX_THREADS = 32


class Rehearsal:
    """Inside the `with`, kernels that this process has not compiled yet are not launched but noted.

    At its end threads begin to compile them: none sooner, or a kernel that is ready would run on what others have left
    out. A kernel that does not compile is left to its first real launch, which says why. For the current device, used
    by one thread.
    """

    def __init__(self) -> None:
        device = torch.cuda.current_device()
        self._pool = ThreadPoolExecutor(
            min(_num_cpus() + 1, _MAX_THREADS), "compile", initializer=torch.cuda.set_device, initargs=(device,)
        )
        self._noted: dict[tuple[Any, str], str] = {}
        self._compiling: list[Future[None]] = []

    def __enter__(self) -> Rehearsal:
        self._hook = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = self._note
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        triton.knobs.runtime.jit_cache_hook = self._hook
        if error is None:
            self._compiling = [self._pool.submit(_compile, fn, data) for (fn, _), data in self._noted.items()]

    def wait(self) -> int:
        """Until everything noted is compiled and loaded; returns how many kernels that were."""
        for compiling in self._compiling:
            compiling.exception()
        self._pool.shutdown()
        return len(self._compiling)

    def _note(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton asks before it compiles: True means that it need not, and that nothing is launched."""
        if compile["is_warmup"]:
            return False  # it is one of our threads that asks
        self._noted[fn.jit_function, key] = compile["specialization_data"]
        return True


def _compile(function: Any, specialization: str) -> None:
    kernel = function.preload(specialization)
    _ = kernel.run  # builds and loads the launcher, and the kernel onto the device


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
