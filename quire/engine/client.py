"""One protocol for the front end, whether the core lives in this process or in its own."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from quire.config.resolve import Resolved
from quire.engine.core import EngineCore
from quire.engine.messages import (
    Abort,
    Aborted,
    Add,
    Call,
    EngineInfo,
    FromCore,
    News,
    Ready,
    Reply,
    Start,
    Stop,
    ToCore,
)
from quire.executor.base import WORKER, make_executor
from quire.foundation.child import Child, Failure
from quire.foundation.errors import EngineDeadError
from quire.types.output import EngineOutputs, EngineStats
from quire.types.request import EngineRequest

_GRACE = 5.0  # seconds for a core to end by itself

__all__ = ["EngineClient", "EngineInfo", "InProcessClient", "ProcessClient"]


class EngineClient(Protocol):
    info: EngineInfo
    last_heard: float
    """time.monotonic() of the latest message. With requests unfinished and an old one, the engine hangs."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. One that can never run comes back as an output with finish_reason 'error'."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests and free what they hold; unknown ids are ignored. No further output comes for them."""
        ...

    def poll(self, timeout: float | None = None) -> EngineOutputs:
        """The next outputs; empty if there are none within `timeout` seconds. Raises EngineDeadError."""
        ...

    def outputs(self) -> AsyncIterator[EngineOutputs]:
        """All outputs from now on, for one asyncio task. Raises EngineDeadError. Ends with `aclose()`."""
        ...

    def call(self, method: str, *args: Any) -> Any:
        """A utility of the core: "stats", "reset_prefix_cache", "check", "drain", "ping", "profile", "worker".

        Waits for the answer, plain data. Raises what the utility raised.
        """
        ...

    async def call_async(self, method: str, *args: Any) -> Any:
        """`call` for an event loop, whether or not it reads `outputs()`."""
        ...

    def shutdown(self) -> None:
        """End the core. Call it from the thread that reads the outputs, or when nobody does."""
        ...


class _Client:
    """What both clients share: outputs wait in a deque, answers find their callers, one thread at a time reads.

    Any thread may add, abort and call. Whoever waits for something reads the messages for all; the others sleep until
    it has news for them.
    """

    info: EngineInfo

    def __init__(self) -> None:
        self.last_heard = time.monotonic()
        self._lock = threading.Condition()
        self._reading = False
        self._waiting_outputs: deque[EngineOutputs] = deque()
        self._calls: dict[int, Future[Any]] = {}
        self._num_calls = 0
        self._aborted: set[str] = set()  # outputs that the core sent before it knew are dropped
        self._dead: EngineDeadError | None = None

    def _send(self, message: ToCore) -> None:
        raise NotImplementedError

    def _receive(self, timeout: float | None) -> Sequence[FromCore]:
        """Messages of the core, waiting up to `timeout` seconds for the first. Raises EngineDeadError."""
        raise NotImplementedError

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        self._raise_if_dead()
        self._send(Add(request))

    def abort(self, request_ids: Sequence[str]) -> None:
        ids = list(request_ids)
        if not ids or self._dead is not None:
            return
        with self._lock:
            self._aborted.update(ids)
            self._waiting_outputs = deque(self._without_aborted(outputs) for outputs in self._waiting_outputs)
        self._send(Abort(ids))

    def poll(self, timeout: float | None = None) -> EngineOutputs:
        self._read_until(lambda: bool(self._waiting_outputs), timeout)
        with self._lock:
            if self._waiting_outputs:
                return self._waiting_outputs.popleft()
        self._raise_if_dead()
        return EngineOutputs()

    # -- utilities -----------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any) -> Any:
        answer = self._call(method, args)
        self._read_until(answer.done, None)
        return answer.result()

    async def call_async(self, method: str, *args: Any) -> Any:
        answer = self._call(method, args)
        await asyncio.to_thread(self._read_until, answer.done, None)
        return answer.result()

    def stats(self) -> EngineStats:
        return msgspec.convert(self.call("stats"), EngineStats)

    def _call(self, method: str, args: Sequence[Any]) -> Future[Any]:
        self._raise_if_dead()
        answer: Future[Any] = Future()
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
            self._calls[number] = answer
        self._send(Call(number, method, list(args)))
        return answer

    # -- reading -------------------------------------------------------------------------------------------------

    def _read_until(self, ready: Callable[[], bool], timeout: float | None) -> None:
        """Return when `ready()`, after `timeout` seconds or when the core is dead."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not ready() and self._dead is None:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if self._reading:
                    self._lock.wait(left)
                else:
                    self._read(left)
                if left == 0:
                    return

    def _read(self, timeout: float | None) -> None:
        """Read once, with the lock let go meanwhile."""
        self._reading = True
        self._lock.release()
        messages: Sequence[FromCore] = ()
        death: EngineDeadError | None = None
        try:
            messages = self._receive(timeout)
        except EngineDeadError as error:
            death = error
        finally:
            self._lock.acquire()
            self._reading = False
            self._take(messages, death)

    def _take(self, messages: Sequence[FromCore], death: EngineDeadError | None = None) -> None:
        for message in messages:
            match message:
                case News(outputs):
                    self._waiting_outputs.append(self._without_aborted(outputs))
                case Aborted(ids):
                    self._aborted.difference_update(ids)
                case Reply(number, value, failure):
                    answer = self._calls.pop(number)
                    if not answer.set_running_or_notify_cancel():
                        continue
                    if failure is None:
                        answer.set_result(value)
                    else:
                        answer.set_exception(failure.error())
                case Failure():
                    death = EngineDeadError(message.message)
        if messages:
            self.last_heard = time.monotonic()
        if death is not None:
            self._die(death)
        self._lock.notify_all()

    def _without_aborted(self, outputs: EngineOutputs) -> EngineOutputs:
        if not self._aborted:
            return outputs
        kept = [output for output in outputs.outputs if output.request_id not in self._aborted]
        return EngineOutputs(outputs=kept, stats=outputs.stats)

    def _die(self, error: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = error
        while self._calls:
            _, answer = self._calls.popitem()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))


class InProcessClient(_Client):
    """The core in this process: whoever polls runs it."""

    def __init__(self, resolved: Resolved, worker: str = WORKER) -> None:
        """Starts the engine. Raises ConfigError if the model cannot run here."""
        super().__init__()
        self._inbox = _LocalInbox()
        self._thread: ThreadPoolExecutor | None = None
        self._core = EngineCore(resolved, make_executor(resolved, worker))
        try:
            self.info = self._core.start()
        except BaseException:
            self._core.shutdown()
            self._inbox.close()
            raise

    def _send(self, message: ToCore) -> None:
        self._inbox.put(message)

    def _receive(self, timeout: float | None) -> Sequence[FromCore]:
        return self._core.turn(self._inbox, timeout)

    async def outputs(self) -> AsyncIterator[EngineOutputs]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-core")
        while True:
            yield await asyncio.get_running_loop().run_in_executor(self._thread, self.poll, None)

    def shutdown(self) -> None:
        if self._inbox.closed:
            return
        if self._dead is None:
            self._send(Stop())
            self._read_until(lambda: False, None)  # until it is dead
        if self._thread is not None:
            self._thread.shutdown()
        self._core.shutdown()
        self._inbox.close()


class _LocalInbox:
    """The Inbox of a core in this process; any thread puts. A pipe wakes the core, so that it can wait for a worker too."""

    def __init__(self) -> None:
        self._messages: deque[ToCore] = deque()
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(self._wake, False)
        self.closed = False

    def put(self, message: ToCore) -> None:
        self._messages.append(message)
        try:
            os.write(self._wake, b"!")
        except BlockingIOError:
            pass  # full: it is awake for sure

    def drain(self) -> list[ToCore]:
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def wait(self, timeout: float | None, sentinel: int | None) -> None:
        poll = select.poll()
        for fd in (self._awake, sentinel):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        poll.poll(None if timeout is None else timeout * 1000)
        try:
            os.read(self._awake, 65536)  # before `drain`: what comes in between wakes us once too often, never too rarely
        except BlockingIOError:
            pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._awake)
            os.close(self._wake)


class ProcessClient(_Client):
    """The core in a process of its own."""

    def __init__(self, resolved: Resolved, worker: str = WORKER) -> None:
        """Starts the engine. Raises ConfigError if the model cannot run here."""
        super().__init__()
        self._child: Child[FromCore] = Child("quire.engine.process", FromCore, "engine core process")
        self._loop_reads: asyncio.Event | None = None
        try:
            self._child.channel.send(Start(resolved, worker))
            while (message := self._child.receive()) is None:
                pass
        except BaseException:
            self._child.stop(grace=0)
            raise
        if not isinstance(message, Ready):
            self._child.stop()
            raise message.error() if isinstance(message, Failure) else EngineDeadError(f"unexpected {message!r}")
        self.info = message.info

    @property
    def pid(self) -> int:
        return self._child.pid

    def _send(self, message: ToCore) -> None:
        self._child.channel.send(message)

    def _receive(self, timeout: float | None) -> Sequence[FromCore]:
        message = self._child.receive(timeout)
        return () if message is None else (message,)

    async def outputs(self) -> AsyncIterator[EngineOutputs]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        sockets = (self._child.channel.fileno(), self._child.lifeline)

        def read_all() -> None:
            with self._lock:
                while self._dead is None:
                    try:
                        message = self._child.receive(0)
                    except EngineDeadError as error:
                        self._take((), error)
                    else:
                        if message is None:
                            break
                        self._take((message,))
            if self._dead is not None:
                detach()
            news.set()

        def detach() -> None:
            for fd in sockets:
                loop.remove_reader(fd)

        with self._lock:
            while self._reading:
                self._lock.wait()
            self._reading = True
        for fd in sockets:
            loop.add_reader(fd, read_all)
        self._loop_reads = news
        try:
            read_all()
            while True:
                while self._waiting_outputs:
                    yield self._waiting_outputs.popleft()
                self._raise_if_dead()
                news.clear()
                await news.wait()
        finally:
            detach()
            self._loop_reads = None
            with self._lock:
                self._reading = False
                self._lock.notify_all()

    def shutdown(self) -> None:
        if self._dead is None:
            self._send(Stop())
        if self._loop_reads is None:
            self._read_until(lambda: False, _GRACE)  # until it is dead; another thread may be reading
        self._child.stop(_GRACE if self._dead is None else 1.0)
        with self._lock:
            self._die(EngineDeadError("the engine was shut down"))
            self._lock.notify_all()
        if self._loop_reads is not None:
            self._loop_reads.set()
