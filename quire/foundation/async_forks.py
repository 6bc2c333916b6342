"""The side of an event loop to a server of forks (`fork_server.py`)."""

from __future__ import annotations

import asyncio
import itertools

from quire.foundation.errors import QuireError
from quire.foundation.fork_server import HEAD, frame, spawn

MAX_TRIES = 2  # of one piece, if the server ends under it


class AsyncForks:
    """Used on one event loop. The process is started when it is first needed, and again if it has ended.

    module, arguments, environment: as `fork_server.spawn` takes them.
    """

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        self._module, self._arguments, self._environment = module, arguments, environment
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()
        self.pid: int | None = None

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
        async with self._starting:
            if self._writer is None:
                await self._start()
        writer, reader = self._writer, self._reader
        assert writer is not None
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

    def _take_back(self, number: int) -> None:
        """The client is gone."""
        if self._writer is not None:
            self._writer.write(frame(number, b""))

    async def _start(self) -> None:
        process, sock = await asyncio.to_thread(spawn, self._module, *self._arguments, **self._environment)
        self.pid = process.pid
        reader, self._writer = await asyncio.open_connection(sock=sock)

        async def read() -> None:
            try:
                while True:
                    length, number = HEAD.unpack(await reader.readexactly(HEAD.size))
                    answer = await reader.readexactly(length)
                    if number in self._waiting and not self._waiting[number].done():
                        self._waiting[number].set_result(answer)
            except (asyncio.IncompleteReadError, OSError):
                pass
            finally:
                if self._writer is not None:
                    self._writer.close()
                self._writer = None
                process.kill()
                process.wait()
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(ConnectionResetError())

        self._reader = asyncio.create_task(read(), name=f"forks of {self._module}")
