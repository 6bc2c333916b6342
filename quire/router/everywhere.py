"""Requests that change a server, and so are for all of them: adapters, caches, profiles, sleep."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from quire.router.backend import Backend
from quire.router.choose import Chooser
from quire.router.fleet import Fleet
from quire.router.proxy import GoneError, head_for, read_body, reply_error, reply_json, reply_whole
from quire.router.upstream import Head, UpstreamError

_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_EMPTYING = ("/reset_prefix_cache", "/flush_cache", "/sleep")  # caches
# Other engines' servers have some that ours have not.
PATHS = frozenset(
    {
        *_ADAPTERS, *_EMPTYING, "/reset_mm_cache", "/reset_encoder_cache", "/wake_up", "/pause", "/resume",
        "/start_profile", "/stop_profile",
    }
)  # fmt: skip
PATIENCE = 600.0  # seconds: adapters come from slow disks, sleep waits for requests
_SHOWN = 300  # characters of an answer


class _Answer(NamedTuple):
    """error: why there is none."""

    backend: Backend
    head: Head
    body: bytes
    error: str = ""

    @property
    def is_done(self) -> bool:
        with suppress(ValueError, AttributeError):
            if json.loads(self.body).get("success") is False:
                return False
        return 200 <= self.head.status < 300

    def described(self) -> str:
        said = self.error or f"{self.head.status} {self.body[:_SHOWN].decode(errors='replace')}".strip()
        return f"{self.backend.url}: {said}"


class Everywhere:
    """Asks all servers that are not on their way out, those too that take no requests now: they may be back."""

    def __init__(self, fleet: Fleet, chooser: Chooser, most_bytes: int) -> None:
        self._fleet, self._chooser, self._most_bytes = fleet, chooser, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer is a server's own if all have done it or all refuse alike; else 502, which says who has not."""
        try:
            body = await read_body(receive, self._most_bytes)
        except GoneError:
            return
        if body is None:
            await reply_error(send, 413, f"the body is larger than {self._most_bytes} bytes")
            return
        backends = [backend for backend in self._fleet.backends if not backend.is_removed]
        if not backends:
            await reply_error(send, 503, "there is no server")
            return
        answers = await asyncio.gather(*(self._ask(backend, scope, body) for backend in backends))
        done = [answer for answer in answers if answer.is_done]
        statuses = {answer.head.status for answer in answers}
        if len(done) == len(answers) or (not done and len(statuses) == 1 and statuses != {0}):
            await reply_whole(send, answers[0].head, answers[0].body)
            return
        told = "; ".join(answer.described() for answer in answers if not answer.is_done)
        message = f"{scope['path']}: done by {len(done)} of {len(answers)} servers. Not by {told}"
        error = {"message": message, "type": "partial_failure", "param": None, "code": 502}
        servers = {answer.backend.url: answer.head.status for answer in answers}
        await reply_json(send, {"error": error, "servers": servers}, 502)

    async def _ask(self, backend: Backend, scope: Scope, body: bytes) -> _Answer:
        backend.in_flight += 1
        try:
            async with asyncio.timeout(PATIENCE):
                head, said = await self._fleet.exchange(backend, head_for(scope, body, backend), body)
        except UpstreamError as error:
            return _Answer(backend, Head(), b"", str(error))
        except TimeoutError:
            return _Answer(backend, Head(), b"", f"it has not answered for {PATIENCE:g} seconds, and may yet do it")
        finally:
            backend.in_flight -= 1
            if scope["path"] in _EMPTYING:
                self._chooser.forget(backend)
            backend.has_other_models |= scope["path"] in _ADAPTERS
            self._fleet.settle(backend)
        return _Answer(backend, head, said)
