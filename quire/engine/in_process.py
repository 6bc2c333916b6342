"""The client of a core in this process: whoever polls runs the loop."""

from __future__ import annotations

import asyncio
import os
import select
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from quire.config.resolve import Resolved
from quire.engine.core import EngineCore
from quire.engine.lives import Lives, with_room
from quire.engine.messages import FromCore, StopCore, ToCore
from quire.engine.reader import ClientBase
from quire.executor.base import WORKER, make_executor
from quire.foundation.errors import EngineDeadError, QuireError
from quire.observe.profiling import PhaseClock
from quire.types.output import EngineOutputs

T = TypeVar("T")


class InProcessClient(ClientBase):
    """The core in this process: whoever polls runs it."""

    def __init__(self, resolved: Resolved, worker: str = WORKER, clock: PhaseClock | None = None) -> None:
        """Starts the engine. Raises ConfigError if the model cannot run here."""
        super().__init__(resolved)
        self._resolved, self._worker, self._clock = resolved, worker, clock
        self._lives = Lives(resolved.config.runtime.max_engine_restarts)
        self._thread: ThreadPoolExecutor | None = None
        self.restart_seconds = 0.0
        self._start()

    def _start(self) -> None:
        self._inbox = LocalInbox()
        executor = make_executor(self._resolved, self._worker)
        self._core = EngineCore(self._resolved, executor, self._clock, self._last_stats)
        self._close = weakref.finalize(self, _close, self._core, self._inbox)  # also for who forgets `shutdown`
        self._close.atexit = False  # the process gives all back by itself
        try:
            self.info = self._core.start()
        except BaseException:
            self._close()
            raise

    @property
    def can_restart(self) -> bool:
        """Only where the worker is another process: what it leaves of the device in this one cannot be trusted."""
        return self._resolved.executor != "uni" and not self._inbox.closed and not self._lives.is_over

    def restart(self) -> None:
        cause = str(self._dead)
        if not self.can_restart:
            raise EngineDeadError(cause)
        self._close()
        self._lives.end(cause, served=self._served)
        self._count_restart()
        self._resolved = with_room(self._resolved, self.info)
        while True:
            try:
                self._start()
                break
            except QuireError as error:
                time.sleep(self._lives.end_at_start(str(error)))
        with self._lock:
            self._begin()

    def _send(self, message: ToCore) -> None:
        self._inbox.put(message)

    def _receive(self, timeout: float | None) -> Sequence[FromCore]:
        return self._core.turn(self._inbox, timeout)

    def run_in_worker(self, function: Callable[[Any], T], /) -> T:
        found: Future[T] = Future()

        def run(worker: Any) -> None:
            try:
                found.set_result(function(worker))
            except Exception as error:
                found.set_exception(error)

        self.call("worker", run)
        return found.result()

    async def outputs(self) -> AsyncGenerator[EngineOutputs, None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-core")
        while True:
            yield await asyncio.get_running_loop().run_in_executor(self._thread, self.poll, None)

    def shutdown(self) -> None:
        if self._inbox.closed:
            return
        self._end_loggers()
        if self._dead is None:
            self._send(StopCore())
            self._read_until(lambda: False, None)  # until it is dead
        if self._thread is not None:
            self._thread.shutdown()
        self._close()


def _close(core: EngineCore, inbox: LocalInbox) -> None:
    core.shutdown()
    inbox.close()


class LocalInbox:
    """The Inbox of a core in this process; any thread puts. A pipe wakes it, for it may have to watch a worker too."""

    def __init__(self) -> None:
        self._messages: deque[ToCore] = deque()
        self._sleeps = False
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(self._wake, False)
        self.closed = False

    def put(self, message: ToCore) -> None:
        self._messages.append(message)
        if not self._sleeps:
            return  # it looks before it falls asleep
        try:
            os.write(self._wake, b"!")
        except BlockingIOError:
            pass  # full: it is awake for sure

    def drain(self) -> list[ToCore]:
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def wait(self, timeout: float | None, *sentinels: int) -> None:
        poll = select.poll()
        for fd in (self._awake, *sentinels):
            poll.register(fd, select.POLLIN)
        self._sleeps = True
        try:
            if not self._messages:
                poll.poll(None if timeout is None else timeout * 1000)
        finally:
            self._sleeps = False
        try:
            os.read(self._awake, 65536)  # before `drain`: rather wake once too often than too rarely
        except BlockingIOError:
            pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._awake)
            os.close(self._wake)
