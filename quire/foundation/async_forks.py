"""The side of an event loop to a server of forks (`fork_server.py`)."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod

from quire.foundation.errors import QuireError
from quire.foundation.fork_server import HEAD, frame, spawn

MAX_TRIES = 2  # of one piece, if the server ends under it
_LONG = 4096  # bytes of an answer, after which others get a turn


class ForkProcess(ABC):
    """Used on one event loop. The process is started when it is first needed, and again if it has ended.

    module, arguments, environment: as `fork_server.spawn` takes them.
    """

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        self._module, self._arguments, self._environment = module, arguments, environment
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self.pid: int | None = None

    @abstractmethod
    def _received(self, number: int, body: bytes) -> None:
        """A frame has come."""

    @abstractmethod
    def _lost(self) -> None:
        """The process has ended."""

    def _greeting(self) -> bytes:
        """What the process gets first; nothing if it is empty."""
        return b""

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._writer is None:
                await self._start()
        assert self._writer is not None
        return self._writer

    def _take_back(self, number: int) -> None:
        """Nobody waits any more."""
        if self._writer is not None:
            self._writer.write(frame(number, b""))

    async def _start(self) -> None:
        process, sock = await asyncio.to_thread(spawn, self._module, *self._arguments, **self._environment)
        self.pid = process.pid
        reader, self._writer = await asyncio.open_connection(sock=sock)
        if greeting := self._greeting():
            self._writer.write(frame(0, greeting))

        async def read() -> None:
            try:
                while True:
                    length, number = HEAD.unpack(await reader.readexactly(HEAD.size))
                    self._received(number, await reader.readexactly(length))
                    if length > _LONG:
                        await asyncio.sleep(0)  # what has come already is read without waiting
            except (asyncio.IncompleteReadError, OSError):
                pass
            finally:
                if self._writer is not None:
                    self._writer.close()
                self._writer = None
                process.kill()
                process.wait()
                self._lost()

        self._reader = asyncio.create_task(read(), name=f"forks of {self._module}")


class AsyncForks(ForkProcess):
    """Pieces of work, each with one answer."""

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        super().__init__(module, *arguments, **environment)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    @property
    def num_waiting(self) -> int:
        """Pieces that are asked for and not there yet."""
        return len(self._waiting)

    async def ask(self, body: bytes) -> bytes:
        """The answer to a piece, empty if its fork exceeded the limits. Being cancelled takes the piece back.

        Raises QuireError if the server ends again and again.
        """
        for _ in range(MAX_TRIES):
            try:
                return await self._ask(body)
            except ConnectionError:
                continue
        raise QuireError(f"the process {self._module} has ended")

    async def _ask(self, body: bytes) -> bytes:
        writer = await self._connected()
        reader = self._reader
        assert reader is not None
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            writer.write(frame(number, body))
            await writer.drain()
            return await answer
        except ConnectionError:
            await asyncio.wait({reader})  # it clears away what the next try must not find
            raise
        finally:
            self._waiting.pop(number, None)
            if not answer.done() or answer.cancelled():
                self._take_back(number)

    def _received(self, number: int, body: bytes) -> None:
        if number in self._waiting and not self._waiting[number].done():
            self._waiting[number].set_result(body)

    def _lost(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError())
