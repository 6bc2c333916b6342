"""Many kernels compiled at once: while a step is rehearsed its launches are only noted, and compiled aside.

Triton compiles a kernel when it is first launched: one after the other, about half a second each with its C launcher.
More than half of that is Python, which threads of one process do not share well; so what Triton's cache does not have,
other processes put there (`compilers.py`), and threads load it. Every variant that the rehearsed step would launch is
found this way; nobody keeps a list.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from quire.foundation.cores import usable_cores
from quire.kernels.triton.compile_lock import CompileLock
from quire.kernels.triton.compilers import MAX_FORKS, TRITON_TESTED, take_compilers
from quire.kernels.triton.kernel_names import settle_name

logger = logging.getLogger(__name__)

_READINGS = 10  # of a function that other threads may spoil
_TAKES_MEMORY = (
    torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided
)  # fmt: skip


def whole(make: Callable[[], Any]) -> Any:
    """What `make` returns, which reads Python's source. Python 3.11 counts for all threads together how deep it is in a
    syntax tree; who finds another's number in the end, as a collection of garbage let others in, is told so and reads
    again. Of a function that a kernel calls, Triton says so as the cause of an error of its own."""
    for _ in range(_READINGS - 1):
        try:
            return make()
        except Exception as error:
            if not _is_spoilt(error):
                raise
    return make()


def _is_spoilt(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, SystemError) and "recursion depth mismatch" in str(error):
            return True
        error = error.__cause__
    return False


def is_possible() -> bool:
    """Whether this Triton is one whose launches can be noted; if not, kernels are compiled at their first launch."""
    if triton.__version__.startswith(TRITON_TESTED):
        return True
    known = " or ".join(version + "x" for version in TRITON_TESTED)
    logger.warning("triton %s: kernels are compiled one by one, not many at once as with %s", triton.__version__, known)
    return False


class Rehearsal:
    """Inside the `with`, this thread launches no kernel; those that the process has not compiled yet are compiled from
    there on.

    So what kernels should have written is not there: memory that is taken inside holds zeros, since torch's own
    operations still run, and some look up by it. A kernel that does not compile is left to its first real launch, which
    says why.
    """

    def __init__(self) -> None:
        threads = min(usable_cores() + 1, MAX_FORKS)
        self._pool = ThreadPoolExecutor(
            threads, "compile", initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
        )
        self._lock = CompileLock(Path(triton.knobs.cache.dir))
        self._compilers = take_compilers()
        if self._compilers is not None:
            weakref.finalize(self, self._compilers.close)  # of one that nobody waits for
        self._zeros = _ZeroedMemory()
        self._noted: set[tuple[Any, str]] = set()
        self._launchers: dict[tuple[str, ...], Future[None]] = {}  # by types of arguments: who makes the first
        self._compiling: list[Future[None]] = []

    def __enter__(self) -> Rehearsal:
        if self._compilers is not None:
            self._compilers.install()
        self._thread = threading.get_ident()
        self._run, self._hook = JITFunction.run, triton.knobs.runtime.jit_cache_hook
        run, thread = self._run, self._thread

        seen: set[Any] = set()  # launches that differ in nothing that a kernel is compiled for: the layers of a model

        def rehearse(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return run(function, *args, grid=grid, warmup=warmup, **kwargs)
            whole(partial(settle_name, function))  # which the hash of a function is made of
            launch = (function, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
            if launch in seen:
                return None
            seen.add(launch)
            return whole(partial(run, function, *args, grid=grid, warmup=True, **kwargs))

        JITFunction.run = rehearse
        triton.knobs.runtime.jit_cache_hook = self._note
        self._zeros.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._zeros.__exit__(kind, error, at)
        JITFunction.run = self._run
        triton.knobs.runtime.jit_cache_hook = self._hook
        if error is not None:
            if self._compilers is not None:
                self._compilers.close()
            self._pool.shutdown(cancel_futures=True)

    def wait(self) -> int:
        """Until everything noted is compiled and loaded; returns how many kernels that were."""
        for compiling in self._compiling:
            if (error := compiling.exception()) is not None:
                logger.debug("a kernel is left to its first launch", exc_info=error)
        self._pool.shutdown()
        if self._compilers is not None:
            self._compilers.close()
            if failed := len(self._compilers.failed):
                logger.warning("%d kernels had to be compiled in this process, one after the other", failed)
        return len(self._compiling)

    def _note(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton asks before it compiles: True means that it need not."""
        if threading.get_ident() != self._thread:
            return False
        function, types = fn.jit_function, tuple(map(str, compile["signature"].values()))
        if (function, key) not in self._noted:
            self._noted.add((function, key))
            first = self._launchers.get(types)
            compiling = self._pool.submit(self._compile, function, compile["specialization_data"], first)
            self._launchers.setdefault(types, compiling)
            self._compiling.append(compiling)
        return True

    def _compile(self, function: Any, specialization: str, first: Future[None] | None) -> None:
        """first: makes the same launcher, whose file is not to be put there twice (see CompileLock)."""
        with self._lock:
            if self._compilers is None:
                kernel = whole(partial(function.preload, specialization))
            else:
                with self._compilers.filling_cache(function, specialization, with_launcher=first is None):
                    kernel = whole(partial(function.preload, specialization))
            if first is not None:
                first.exception()
            _ = kernel.run  # builds and loads the launcher, and the kernel onto the device


class _ZeroedMemory(TorchFunctionMode):
    """New tensors of this thread that torch would leave as they are hold zeros.

    Not a mode of dispatch: with its first operation torch imports its compiler and all that this needs, 4 s.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _TAKES_MEMORY else made


def _kind(argument: Any) -> Any:
    """Equal for arguments for which the same kernel is compiled; not always the reverse."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if hasattr(argument, "block_shape"):  # a descriptor of one: the kernel is told how large it is
        return _kind(argument.base), tuple(argument.block_shape), getattr(argument, "layout", None), argument.padding
    return type(argument), argument if isinstance(argument, Hashable) else id(argument)
