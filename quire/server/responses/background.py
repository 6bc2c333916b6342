"""A response that is made in the background: its events are kept, and may be read from any point while it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from quire.foundation.log import get_logger
from quire.server.generate.generation import Generation
from quire.server.http.errors import explain
from quire.server.responses.events import ResponseWriter

log = get_logger(__name__)

FINAL = ("completed", "incomplete", "failed", "cancelled")


class BackgroundRun:
    """`on_done` is called once, when the response is final."""

    def __init__(self, job: Generation, writer: ResponseWriter, on_done: Callable[[], None]) -> None:
        in_flight = job.service.in_flight
        self.num_bytes = 0  # of the events
        self._outputs = job.outputs
        self._writer = writer
        self._in_flight = in_flight
        self._on_done = on_done
        self._frames: list[bytes] = []
        self._changed = asyncio.Event()
        self.is_done = False
        self._task = asyncio.create_task(self._work(), name="quire-response")
        self._task.add_done_callback(self._end)
        in_flight.tasks.add(self._task)
        in_flight.num_answers += 1

    async def cancel(self) -> None:
        """Returns when the response is final. The engine's request is aborted."""
        self._task.cancel()
        while not self.is_done:
            await self._changed.wait()

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events behind the one numbered `after`, as they come, to the end."""
        at = after + 1
        while True:
            while at < len(self._frames):
                yield self._frames[at]
                at += 1
            if self.is_done:
                return
            await self._changed.wait()

    async def _work(self) -> None:
        for frame in self._writer.queued():
            self._push(frame)
        async with aclosing(self._outputs()) as outputs:
            async for _, output in outputs:
                for frame in self._writer.take(output):
                    self._push(frame)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._in_flight.tasks.discard(task)
        self._in_flight.num_answers -= 1
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and explain(error)[0] == 500:
            log.error("a response in the background broke off", exc_info=error)
        self.is_done = True
        if self._writer.reply["status"] in FINAL:
            self._push(None)
        elif isinstance(error, Exception):
            self._push(self._writer.failed(error))
        else:
            self._push(self._writer.cancelled())
        self._on_done()

    def _push(self, frame: bytes | None) -> None:
        if frame is not None:
            self._frames.append(frame)
            self.num_bytes += len(frame)
        self._changed.set()
        self._changed = asyncio.Event()
