"""The clients of a core in another process: of the process that started it, and of those that join."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quire.config.resolve import Resolved
from quire.engine import early
from quire.engine.lives import Lives, with_room
from quire.engine.messages import EngineInfo, FromCore, Join, Leave, Ready, StartCore, StopCore, ToCore
from quire.engine.places import environment_of
from quire.engine.reader import ClientBase
from quire.executor.base import WORKER
from quire.foundation.child import Child, Failure
from quire.foundation.errors import EngineDeadError, InputError, QuireError
from quire.foundation.log import get_logger
from quire.foundation.wire import Channel
from quire.types.output import EngineOutputs

T = TypeVar("T")
_GRACE = 5.0  # seconds for a core to end by itself
_log = get_logger(__name__)


class ChannelClient(ClientBase):
    """Reads a channel, from any thread or on an event loop."""

    def __init__(self, resolved: Resolved | None = None, number: int = 0) -> None:
        super().__init__(resolved, number)
        self._detach: Callable[[], None] | None = None  # ends the reading by an event loop

    def run_in_worker(self, _function: Callable[[Any], T], /) -> T:
        raise InputError(
            "a function cannot be sent to the engine's process: name a method of the worker (memory, profile), or use "
            "LLM, whose worker is in its own process",
            "method",
        )

    @abstractmethod
    def _sockets(self) -> Sequence[int]:
        """File descriptors that are readable when there is something to read, or nothing any more."""

    async def outputs(self) -> AsyncGenerator[EngineOutputs, None]:
        news = asyncio.Event()
        detach = self.read_on_loop(asyncio.get_running_loop(), news)
        try:
            while True:
                while (outputs := self.take()) is not None:
                    yield outputs
                news.clear()
                await news.wait()
        finally:
            detach()

    def take(self) -> EngineOutputs | None:
        """Outputs that have been read and that nobody has got yet.

        Raises:
            EngineDeadError: there will be no more.
        """
        if self._waiting_outputs:
            return self._waiting_outputs.popleft()
        self._raise_if_dead()
        return None

    def read_on_loop(self, loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> Callable[[], None]:
        """Let `loop` read whenever there is something, for `take`, and set `news`. Returns what ends it."""
        with self._lock:
            self._lock.wait_for(lambda: not self._reading)
            self._reading = True
        sockets = self._sockets()

        def read_all() -> None:
            with self._lock:
                while self._dead is None and self._read_one():
                    pass
            if self._dead is not None:
                detach()
            news.set()

        def detach() -> None:
            if self._detach is not detach:
                return  # it is done already
            self._detach = None
            for fd in sockets:
                loop.remove_reader(fd)
            with self._lock:
                self._reading = False
                self._lock.notify_all()
            news.set()

        self._detach = detach
        for fd in sockets:
            loop.add_reader(fd, read_all)
        loop.call_soon(read_all)  # what came before gives no sign
        return detach

    def stop_reading(self) -> None:
        """No event loop reads any more. Call it from the loop's thread."""
        if self._detach is not None:
            self._detach()

    def _read_one(self) -> bool:
        """Take in a message that is there. Returns whether there was one."""
        try:
            messages = self._receive(0)
        except EngineDeadError as error:
            self._take((), error)
            return False
        self._take(messages)
        return bool(messages)


class ProcessClient(ChannelClient):
    """The core in a process of its own, a child of this one."""

    def __init__(self, resolved: Resolved, worker: str = WORKER, *, number: int = 0, wait: bool = True) -> None:
        """Starts the engine, as the one of this number where there are several.

        Raises ConfigError if the model cannot run here. Without `wait`: see wait_until_ready.
        """
        super().__init__(resolved, number)
        self._resolved, self._worker = resolved, worker
        self._environment = environment_of(resolved, number)
        is_alone = resolved.config.runtime.data_parallel_size == 1
        self._title = early.TITLE if is_alone else f"process of engine core {number}"
        self._lives = Lives(resolved.config.runtime.max_engine_restarts)
        self._restarting = threading.Lock()
        self._ending = threading.Event()
        self.restart_seconds = 0.0
        self._start()
        if wait:
            self.wait_until_ready()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._child: Child[FromCore] = early.take(self._title, self._environment)
        self._child.channel.send(StartCore(self._resolved, self._worker, self._last_stats))

    def wait_until_ready(self) -> None:
        """Only then can it be used. Raises ConfigError if the model cannot run here."""
        try:
            while (message := self._child.receive()) is None:
                pass
        except BaseException:
            self._child.stop(grace=0)
            raise
        if not isinstance(message, Ready):
            self._child.stop()
            raise message.error() if isinstance(message, Failure) else EngineDeadError(f"unexpected {message!r}")
        self.info = message.info
        self.restart_seconds = time.monotonic() - self._began

    @property
    def can_restart(self) -> bool:
        return not self._lives.is_over and not self._ending.is_set()

    def restart(self) -> None:
        with self._restarting:
            cause = str(self._dead)
            if self._ending.is_set():
                raise EngineDeadError(cause)
            self._child.stop(grace=0)
            self._lives.end(cause, served=self._served)
            self._count_restart()
            # Whoever was let in must find the room that the first one had.
            self._resolved = with_room(self._resolved, self.info)
            while not self._try_to_start(cause):
                pass
            with self._lock:
                self._begin()

    def _try_to_start(self, cause: str) -> bool:
        self._start()
        if self._ending.is_set():  # `shutdown` has killed the one before
            self._child.kill()
        try:
            self.wait_until_ready()
        except QuireError as error:
            if self._ending.is_set():
                raise EngineDeadError(cause) from None
            pause = self._lives.end_at_start(str(error))
            _log.error("the engine cannot be started again; the next try is in %g s: %s", pause, error)
            self._ending.wait(pause)
            return False
        return True

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """End the core now, also while another thread waits until it is ready."""
        self._child.kill()

    def join(self, client: int, folder: Path) -> None:
        """Let another process be a client of the core: `JoinedClient(info, folder)` there. `folder` must exist."""
        self._child.channel.send(Join(client, str(folder)))

    def leave(self, client: int) -> None:
        """That process is gone, or will add nothing any more: the core aborts what it had asked for."""
        self._child.channel.send(Leave(client))

    def _sockets(self) -> Sequence[int]:
        return self._child.channel.fileno(), self._child.lifeline

    def _send(self, message: ToCore) -> None:
        self._child.channel.send(message)

    def _receive(self, timeout: float | None) -> Sequence[FromCore]:
        message = self._child.receive(timeout)
        return () if message is None else (message,)

    def shutdown(self) -> None:
        self._ending.set()
        if self._restarting.locked():
            self._child.kill()  # who waits for it gives up
        with self._restarting:
            self._shut_down()

    def _shut_down(self) -> None:
        if not self._child.is_open:
            return
        self.stop_reading()
        self._end_loggers()
        if self._dead is None:
            self._send(StopCore())
        self._read_until(lambda: False, _GRACE)  # until it is dead; another thread may be reading
        self._child.stop(grace=0 if self._dead is None else _GRACE)
        with self._lock:
            self._die(EngineDeadError("the engine was shut down"))
            self._lock.notify_all()


class JoinedClient(ChannelClient):
    """A core that another process has started. Who started it must say here when the core is dead (`die`), and whether
    another one has taken its place (`rejoin`)."""

    owns_engine = False

    def __init__(self, info: EngineInfo, folder: Path) -> None:
        super().__init__()
        self.info = info
        self._channel: Channel[FromCore] = Channel(folder, FromCore, parent=True)
        self._over, self._end = os.pipe()  # readable once `die` was called
        self._cause = ""
        self._was_killed = False
        self._is_open = True
        self._next: tuple[EngineInfo, Path] | None = None
        self.can_restart = True
        self.restart_seconds = 0.0

    def die(self, cause: str, *, was_killed: bool = False, for_good: bool = True, restart_seconds: float = 0.0) -> None:
        """The core is dead. Any thread may say so, and more than once. restart_seconds: until there is another one,
        probably."""
        with self._lock:
            self._next = None
            self._was_killed = was_killed
            self.restart_seconds = restart_seconds
            self.can_restart = self.can_restart and not for_good
            if not self._cause:
                os.write(self._end, b"!")
            if not self._cause or for_good:
                self._cause = cause
            self._lock.notify_all()

    def rejoin(self, info: EngineInfo, folder: Path) -> None:
        """Another core is there, which this process may join over the sockets in `folder`."""
        with self._lock:
            self._next = info, folder
            self._lock.notify_all()

    def restart(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._next is not None or not self.can_restart)
            if self._next is None or not self._is_open:
                raise EngineDeadError(self._cause)
            self.info, folder = self._next
            if self._cause:
                os.read(self._over, 1)
            self._next, self._cause = None, ""
            self._channel.close()
            self._channel = Channel(folder, FromCore, parent=True)
            self._begin()

    def _sockets(self) -> Sequence[int]:
        return self._channel.fileno(), self._over

    def _send(self, message: ToCore) -> None:
        self._channel.send(message)

    def _receive(self, timeout: float | None) -> Sequence[FromCore]:
        message = self._channel.receive()
        if message is None and (timeout is None or timeout > 0):
            self._channel.wait(timeout, self._over)
            message = self._channel.receive()
        if message is None and self._cause:
            raise EngineDeadError(self._cause, was_killed=self._was_killed)
        return () if message is None else (message,)

    def shutdown(self) -> None:
        """Part from the core, which goes on."""
        if not self._is_open:
            return
        self._is_open = False
        self.can_restart = False
        self.stop_reading()
        self.die("the engine was shut down")
        self._read_until(lambda: False, None)  # until it is dead; another thread may be reading
        self._channel.close()
        os.close(self._over)
        os.close(self._end)
