"""The clients of a core in another process: of the process that started it, and of those that join."""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quire.config.resolve import Resolved
from quire.engine.messages import EngineInfo, FromCore, Join, Leave, Ready, StartCore, StopCore, ToCore
from quire.engine.reader import ClientBase
from quire.executor.base import WORKER
from quire.foundation.child import Child, Failure
from quire.foundation.errors import EngineDeadError, InputError
from quire.foundation.wire import Channel
from quire.types.output import EngineOutputs

T = TypeVar("T")
_GRACE = 5.0  # seconds for a core to end by itself


class ChannelClient(ClientBase):
    """Reads a channel, from any thread or on an event loop."""

    def __init__(self) -> None:
        super().__init__()
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
        self._become_reader()
        news = asyncio.Event()
        detach = self._detach = self._read_on_loop(asyncio.get_running_loop(), news)
        try:
            while True:
                while self._waiting_outputs:
                    yield self._waiting_outputs.popleft()
                self._raise_if_dead()
                news.clear()
                await news.wait()
        finally:
            detach()

    def _become_reader(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not self._reading)
            self._reading = True

    def _read_on_loop(self, loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> Callable[[], None]:
        """Let `loop` read whenever there is something, and set `news`. Returns what ends it."""
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

        for fd in sockets:
            loop.add_reader(fd, read_all)
        loop.call_soon(read_all)  # what came before gives no sign
        return detach

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

    def __init__(self, resolved: Resolved, worker: str = WORKER, *, wait: bool = True) -> None:
        """Starts the engine. Raises ConfigError if the model cannot run here. Without `wait`: see wait_until_ready."""
        super().__init__()
        self._child: Child[FromCore] = Child("quire.engine.process", FromCore, "engine core process")
        self._child.channel.send(StartCore(resolved, worker))
        if wait:
            self.wait_until_ready()

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
        if not self._child.is_open:
            return
        if self._dead is None:
            self._send(StopCore())
        if self._detach is not None:
            self._detach()
        self._read_until(lambda: False, _GRACE)  # until it is dead; another thread may be reading
        self._child.stop(grace=0 if self._dead is None else _GRACE)
        with self._lock:
            self._die(EngineDeadError("the engine was shut down"))
            self._lock.notify_all()


class JoinedClient(ChannelClient):
    """A core that another process has started. Who started it must say here when the core is dead (`die`)."""

    def __init__(self, info: EngineInfo, folder: Path) -> None:
        super().__init__()
        self.info = info
        self._channel: Channel[FromCore] = Channel(folder, FromCore, parent=True)
        self._over, self._end = os.pipe()  # readable once `die` was called
        self._cause = ""
        self._is_open = True

    def die(self, cause: str) -> None:
        """The core is dead. Any thread may say so, and more than once."""
        if not self._cause:
            self._cause = cause
            os.write(self._end, b"!")

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
            raise EngineDeadError(self._cause)
        return () if message is None else (message,)

    def shutdown(self) -> None:
        """Part from the core, which goes on."""
        if not self._is_open:
            return
        self._is_open = False
        if self._detach is not None:
            self._detach()
        self.die("the engine was shut down")
        self._read_until(lambda: False, None)  # until it is dead; another thread may be reading
        self._channel.close()
        os.close(self._over)
        os.close(self._end)
