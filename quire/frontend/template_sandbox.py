"""Chat templates that requests bring: strangers' programs, rendered where they can do no harm.

Each is compiled and rendered in a fork of its own (`foundation/fork_server.py`), which may use a second of processor
time and some memory, and cannot hold up the event loop. So nothing has to be known of what Jinja's filters can cost.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.foundation.errors import InputError, QuireError
from quire.foundation.fork_server import HEAD, ForkServer, Limits, frame, spawn
from quire.frontend.chat import ChatTemplate, render

LIMITS = Limits(cpu_seconds=1, wall_seconds=6.0, memory_bytes=256 * 1024**2, forks=2)
TOO_COSTLY = (
    f"chat_template takes more than {LIMITS.cpu_seconds} s of processor time or {LIMITS.memory_bytes // 1024**2} MiB "
    "of memory to render"
)
MAX_TRIES = 2  # of one rendering, if the sandbox ends under it


class Rendering(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of `render`."""

    source: str
    special_tokens: Mapping[str, str]
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: Mapping[str, Any]
    max_chars: int


class _Result(msgspec.Struct, frozen=True, array_like=True):
    text: str
    error: str | None = None
    param: str | None = None


class TemplateSandbox:
    """The server's side, used on one event loop. The process is started when it is first needed."""

    def __init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self.pid: int | None = None
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Renderings that are asked for and not there yet."""
        return len(self._waiting)

    async def render(self, rendering: Rendering) -> str:
        """Raises InputError for what `render` refuses, and for a template that exceeds the limits."""
        body = msgspec.msgpack.encode(rendering)
        for _ in range(MAX_TRIES):
            try:
                answer = await self._ask(body)
            except ConnectionError:
                continue
            if not answer:
                raise InputError(TOO_COSTLY, "chat_template")
            result = msgspec.msgpack.decode(answer, type=_Result)
            if result.error is not None:
                raise InputError(result.error, result.param)
            return result.text
        raise QuireError("the sandbox of chat templates has ended")

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
        process, sock = await asyncio.to_thread(spawn, "quire.frontend.template_sandbox")
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

        self._reader = asyncio.create_task(read(), name="template-sandbox")


def _work(body: bytes) -> bytes:
    """In a fork of the sandbox."""
    given = msgspec.msgpack.decode(body, type=Rendering)
    try:
        text = render(
            given.messages,
            given.tools,
            ChatTemplate(given.source, given.special_tokens),
            given.add_generation_prompt,
            given.continue_final_message,
            given.kwargs,
            given.max_chars,
        )
        result = _Result(text)
    except InputError as error:
        result = _Result("", error.message, error.param)
    return msgspec.msgpack.encode(result)


if __name__ == "__main__":
    ForkServer(socket.socket(fileno=int(sys.argv[1])), _work, LIMITS).run()
