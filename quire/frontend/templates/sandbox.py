"""Chat templates that requests bring: strangers' programs, rendered where they can do no harm.

Each is compiled and rendered in a fork of its own (`foundation/fork_server.py`), which may use a second of processor
time and some memory, and cannot hold up the event loop. So nothing has to be known of what Jinja's filters can cost.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.foundation.async_forks import AsyncForks
from quire.foundation.errors import InputError
from quire.foundation.fork_server import ForkServer, Limits
from quire.frontend.templates.chat import ChatTemplate, render

LIMITS = Limits(cpu_seconds=1, wall_seconds=6.0, memory_bytes=256 * 1024**2, forks=2)
TOO_COSTLY = (
    f"chat_template takes more than {LIMITS.cpu_seconds} s of processor time or {LIMITS.memory_bytes // 1024**2} MiB "
    "of memory to render"
)


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
        self._forks = AsyncForks("quire.frontend.templates.sandbox")

    @property
    def pid(self) -> int | None:
        return self._forks.pid

    @property
    def num_waiting(self) -> int:
        """Renderings that are asked for and not there yet."""
        return self._forks.num_waiting

    async def render(self, rendering: Rendering) -> str:
        """Raises InputError for what `render` refuses, and for a template that exceeds the limits."""
        answer = await self._forks.ask(msgspec.msgpack.encode(rendering))
        if not answer:
            raise InputError(TOO_COSTLY, "chat_template")
        result = msgspec.msgpack.decode(answer, type=_Result)
        if result.error is not None:
            raise InputError(result.error, result.param)
        return result.text


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
