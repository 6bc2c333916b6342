"""Kernels compiled by another process, where Triton's cache does not have them."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import triton
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager

from quire.foundation.cores import usable_cores
from quire.foundation.fork_server import ForkClient
from quire.kernels.triton.compile_lock import CompileLock

# What is used here and in `rehearsal.py` is Triton's inside: of versions that were tested only.
TRITON_TESTED = ("3.6.", "3.9.")
MAX_FORKS = 32
_MIN_CORES = 4  # for fewer another process that loads the compiler costs more than it gains
_SERVER = "quire.kernels.triton.compile_server"
_asking = threading.local()  # `ask`: whom this thread asks for the kernel that it looks for, and how
_begun: dict[str, Compilers] = {}  # by the folder that they put kernels into


class _AskingCache(FileCacheManager):  # type: ignore[misc]
    """Triton's own cache; but who looks for a kernel that is not there has it compiled first."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        found: dict[str, str] | None = super().get_group(filename)
        ask = getattr(_asking, "ask", None)
        if found or ask is None:
            return found
        compilers, body = ask
        compilers.compile(body)
        found = super().get_group(filename)
        if not found:
            compilers.failed.add(body)  # once, though its source may be read again (`rehearsal.whole`)
        return found


class Compilers:
    """Processes that compile kernels, begun when the first is asked for, if not before. Nothing but time is lost where
    they fail: then Triton compiles here.

    What they are told of a kernel is JSON: [[backend, arch, warp size], module, function, specialization, whether to
    build its launcher]. forks: kernels at a time. failed: those that were not in the cache afterwards.
    """

    def __init__(self, forks: int) -> None:
        self._forks = forks
        self._lock = threading.Lock()
        self._client: ForkClient | None = None
        self._awaited: dict[int, Future[bytes]] = {}
        self._count = 0
        self._is_closed = self._has_ended = False
        self.failed: set[bytes] = set()

    @contextmanager
    def filling_cache(self, function: Any, specialization: str, *, with_launcher: bool) -> Iterator[None]:
        """Inside, where this thread looks for that kernel in Triton's cache, it is there if it could be compiled."""
        target = driver.active.get_current_target()
        where = [[target.backend, target.arch, target.warp_size], function.fn.__module__, function.fn.__qualname__]
        body = json.dumps([*where, specialization, with_launcher])
        _asking.ask = self, body.encode()
        try:
            yield
        finally:
            _asking.ask = None

    def install(self) -> None:
        """For all kernels that this process looks for from now on."""
        triton.knobs.cache.manager_class = _AskingCache

    def compile(self, body: bytes) -> None:
        """Wait until it is done, if it can be. Raises CancelledError once they have been ended."""
        done: Future[bytes] = Future()
        with self._lock:
            self._count += 1
            self._awaited[self._count] = done
            try:
                self._begin()
                if self._client is not None:
                    self._client.send(self._count, body)
            except OSError:
                self._is_closed = True
            if self._is_closed:
                self._give_up()
        if not done.result() and self._has_ended:
            raise CancelledError

    def begin(self) -> None:
        """Now, before the first kernel: they have Triton to load."""
        with self._lock, suppress(OSError):
            self._begin()

    def _begin(self) -> None:
        """With the lock."""
        if self._client is None and not self._is_closed:
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            self._client = ForkClient(_SERVER, str(self._forks), **environment)
            threading.Thread(target=self._read, args=(self._client,), name="compilers", daemon=True).start()

    def _read(self, client: ForkClient) -> None:
        try:
            while True:
                for number, answer in client.receive():
                    if (done := self._awaited.pop(number, None)) is not None:
                        done.set_result(answer)
        except EOFError:
            with self._lock:
                self._give_up()

    def _give_up(self) -> None:
        self._is_closed = True
        while self._awaited:
            self._awaited.popitem()[1].set_result(b"")

    def close(self) -> None:
        """End them; what they have not compiled yet nobody does. Idempotent."""
        with self._lock:
            self._has_ended = True
            self._give_up()
            client, self._client = self._client, None
        del triton.knobs.cache.manager_class
        if client is not None:
            with suppress(OSError):
                client.socket.shutdown(socket.SHUT_RDWR)  # else the thread that reads would keep it open
            client.close()


def take_compilers() -> Compilers | None:
    """Those that were begun early, else others; None where they do not pay, or Triton is not asked for its kernels."""
    if usable_cores() < _MIN_CORES or triton.knobs.cache.manager_class is not None:
        return None
    if (begun := _begun.pop(triton.knobs.cache.dir, None)) is not None:
        return begun
    made = Compilers(min(usable_cores(), MAX_FORKS))
    if not CompileLock(Path(triton.knobs.cache.dir)).was_taken:  # nothing is there
        made.begin()
    return made


def begin_early() -> None:
    """Begin those that `take_compilers` will give, where no kernel is there yet: they have Triton to load, as others
    have torch meanwhile."""
    is_empty = not CompileLock(Path(triton.knobs.cache.dir)).was_taken
    if is_empty and triton.__version__.startswith(TRITON_TESTED) and (made := take_compilers()) is not None:
        _begun[triton.knobs.cache.dir] = made
