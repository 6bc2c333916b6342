"""The client of a core in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from quire.config.resolve import Resolved
from quire.engine.messages import FromCore, Ready, Start, Stop, ToCore
from quire.engine.reader import ClientBase
from quire.executor.base import WORKER
from quire.foundation.child import Child, Failure
from quire.foundation.errors import EngineDeadError
from quire.types.output import EngineOutputs

_GRACE = 5.0  # seconds for a core to end by itself


class ProcessClient(ClientBase):
    """The core in a process of its own."""

    def __init__(self, resolved: Resolved, worker: str = WORKER) -> None:
        """Starts the engine. Raises ConfigError if the model cannot run here."""
        super().__init__()
        self._child: Child[FromCore] = Child("quire.engine.process", FromCore, "engine core process")
        self._detach: Callable[[], None] | None = None  # ends the reading by an event loop
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
        sockets = (self._child.channel.fileno(), self._child.lifeline)

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

    def shutdown(self) -> None:
        if not self._child.is_open:
            return
        if self._dead is None:
            self._send(Stop())
        if self._detach is not None:
            self._detach()
        self._read_until(lambda: False, _GRACE)  # until it is dead; another thread may be reading
        self._child.stop(grace=0 if self._dead is None else _GRACE)
        with self._lock:
            self._die(EngineDeadError("the engine was shut down"))
            self._lock.notify_all()
