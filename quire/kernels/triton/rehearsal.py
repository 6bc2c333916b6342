"""Many kernels compiled at once: while a step is rehearsed its launches are only noted, and compiled by threads.

Triton compiles a kernel when it is first launched: one after the other, about half a second each with its C launcher.
Nearly all of that happens outside the interpreter's lock or in other processes (ptxas, the C compiler), so threads
share it well. Every variant that the rehearsed step would launch is found this way; nobody keeps a list.

They begin when all are noted, with the longest. To note them takes a second, and several beside threads that want the
interpreter's lock at every turn; and who rehearses has other things to do that need no lock, as reading weights.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from quire.kernels.triton.compile_lock import CompileLock

logger = logging.getLogger(__name__)

_MAX_THREADS = 32
# `JITFunction.run`, the hook and `preload` are Triton's inside: used with versions that were tested only.
TRITON_TESTED = ("3.6.", "3.9.")


def is_possible() -> bool:
    """Whether this Triton is one whose launches can be noted; if not, kernels are compiled at their first launch."""
    if triton.__version__.startswith(TRITON_TESTED):
        return True
    known = " or ".join(version + "x" for version in TRITON_TESTED)
    logger.warning("triton %s: kernels are compiled one by one, not many at once as with %s", triton.__version__, known)
    return False


class Rehearsal:
    """Inside the `with`, this thread launches no kernel; those that the process has not compiled yet, threads do from
    its end on.

    So what is computed inside is garbage, by which nothing may be looked up. A kernel that does not compile is left to
    its first real launch, which says why.
    """

    def __init__(self) -> None:
        device = torch.cuda.current_device()
        self._pool = ThreadPoolExecutor(
            min(_num_cpus() + 1, _MAX_THREADS), "compile", initializer=torch.cuda.set_device, initargs=(device,)
        )
        self._lock = CompileLock(Path(triton.knobs.cache.dir))
        self._noted: dict[tuple[Any, str], str] = {}  # the kernel's specialization
        self._compiling: list[Future[None]] = []

    def __enter__(self) -> Rehearsal:
        self._thread = threading.get_ident()
        self._run, self._hook = JITFunction.run, triton.knobs.runtime.jit_cache_hook
        run, thread = self._run, self._thread

        seen: set[Any] = set()  # launches that differ in nothing that a kernel is compiled for: the layers of a model

        def rehearse(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return run(function, *args, grid=grid, warmup=warmup, **kwargs)
            launch = (function, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
            if launch in seen:
                return None
            seen.add(launch)
            return run(function, *args, grid=grid, warmup=True, **kwargs)

        JITFunction.run = rehearse
        triton.knobs.runtime.jit_cache_hook = self._note
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        JITFunction.run = self._run
        triton.knobs.runtime.jit_cache_hook = self._hook
        if error is not None:
            return
        longest_first = sorted(self._noted.items(), key=lambda item: _length(item[0][0], set()), reverse=True)
        for (function, _), specialization in longest_first:
            self._compiling.append(self._pool.submit(_compile, function, specialization, self._lock))

    def wait(self) -> int:
        """Until everything noted is compiled and loaded; returns how many kernels that were."""
        for compiling in self._compiling:
            compiling.exception()
        self._pool.shutdown()
        return len(self._compiling)

    def _note(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton asks before it compiles: True means that it need not."""
        if threading.get_ident() != self._thread:
            return False
        function = fn.jit_function
        self._noted[function, key] = compile["specialization_data"]
        return True


def _compile(function: Any, specialization: str, lock: CompileLock) -> None:
    with lock:
        kernel = function.preload(specialization)
        _ = kernel.run  # builds and loads the launcher, and the kernel onto the device


def _length(function: Any, counted: set[Any]) -> int:
    """Characters of a kernel's source and of the functions that it calls: about how long it takes to compile."""
    counted.add(function)
    called = [function.fn.__globals__.get(name) for name in function.fn.__code__.co_names]
    inner = [one for one in called if isinstance(one, JITFunction) and one not in counted]
    return len(function.src) + sum(_length(one, counted) for one in inner if one not in counted)


def _kind(argument: Any) -> Any:
    """Equal for arguments for which the same kernel is compiled; not always the reverse."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return type(argument), argument if isinstance(argument, Hashable) else id(argument)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
