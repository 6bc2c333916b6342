"""The servers that there are: found, looked after, added and removed while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import json

from quire.config.route import RouteConfig
from quire.foundation.log import get_logger
from quire.router.backend import Backend
from quire.router.choose import Chooser
from quire.router.discovery import Source, read_backends
from quire.router.upstream import Head, UpstreamError

_PROBE_SECONDS = 5.0  # for an answer to a question of ours
_MODELS_EVERY = 10  # looks between two at a server's models
log = get_logger(__name__)


class Fleet:
    """chooser: is told when a server's cache is gone."""

    def __init__(self, config: RouteConfig, chooser: Chooser) -> None:
        self._config = config
        self._chooser = chooser
        self._backends: dict[str, Backend] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # that look after them, by URL
        urls, self._sources = read_backends(config.backend)
        self._given = urls
        self.changed = asyncio.Event()  # a server may take requests that did not

    @property
    def backends(self) -> list[Backend]:
        return list(self._backends.values())

    @property
    def able(self) -> list[Backend]:
        """That take requests."""
        return [backend for backend in self._backends.values() if backend.takes_requests]

    async def run(self) -> None:
        """Until cancelled."""
        for url in self._given:
            self.add(url)
        try:
            await asyncio.gather(*(self._discover(source) for source in self._sources), asyncio.Event().wait())
        finally:
            for task in self._tasks.values():
                task.cancel()
            for backend in self.backends:
                backend.pool.close()

    def add(self, url: str, source: str | None = None) -> Backend:
        """url: as `check_url` has it. One that is there is drained no more."""
        if (known := self._backends.get(url)) is not None:
            known.is_draining = known.is_removed = False
            return known
        backend = self._backends[url] = Backend(url, self._config, source)
        self._tasks[url] = asyncio.create_task(self._look_after(backend))
        return backend

    def find(self, url: str) -> Backend | None:
        return self._backends.get(url)

    def remove(self, backend: Backend) -> None:
        """Send it nothing more; it is forgotten once it has answered all."""
        backend.is_draining = backend.is_removed = True
        self.settle(backend)

    def settle(self, backend: Backend) -> None:
        """One of its requests has ended."""
        if backend.is_removed and not backend.in_flight and self._backends.get(backend.url) is backend:
            del self._backends[backend.url]
            self._tasks.pop(backend.url).cancel()
            backend.pool.close()
            self._chooser.forget(backend)

    # -- found ---------------------------------------------------------------------------------------------------

    async def _discover(self, source: Source) -> None:
        while True:
            try:
                urls = await source.urls()
            except OSError as error:
                log.warning("%s: %s", source.name, error)  # what was found before stays
            else:
                for url in urls:
                    self.add(url, source.name)
                for backend in self.backends:
                    if backend.source == source.name and backend.url not in urls:
                        self.remove(backend)
            await asyncio.sleep(self._config.discovery_interval)

    # -- looked after --------------------------------------------------------------------------------------------

    async def _look_after(self, backend: Backend) -> None:
        looks = 0
        while True:
            if backend.breaker.may_probe:
                was_ready, was_able = backend.is_ready, backend.takes_requests
                backend.is_ready = await self._probe(backend)
                wants_models = not was_ready or backend.has_other_models or looks % _MODELS_EVERY == 0
                if backend.is_ready and wants_models:
                    backend.has_other_models = False
                    backend.models = await self._models(backend)
                if backend.is_ready:
                    backend.breaker.succeed()
                    await self._read_load(backend)
                if backend.takes_requests != was_able:
                    log.info("%s takes %s", backend.url, "requests" if backend.takes_requests else "no requests")
                    self.changed.set()
                looks += 1
            await asyncio.sleep(self._config.health_interval)

    async def _probe(self, backend: Backend) -> bool:
        status, _ = await self._ask(backend, "/readyz")
        if status == 404:  # another engine's server
            status, _ = await self._ask(backend, "/health")
        if status == 0:
            backend.breaker.fail(at_once=True)
            self._chooser.forget(backend)
        return status == 200

    async def _models(self, backend: Backend) -> list[dict[str, object]]:
        status, body = await self._ask(backend, "/v1/models")
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            if status == 200:
                return [model for model in json.loads(body)["data"] if isinstance(model, dict)]
        return backend.models

    async def _read_load(self, backend: Backend) -> None:
        own = backend.in_flight
        status, body = await self._ask(backend, "/load")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if status == 200:
                backend.others = max(0, int(json.loads(body)["server_load"]) - max(own, backend.in_flight))

    async def _ask(self, backend: Backend, path: str) -> tuple[int, bytes]:
        """Status and body; status 0: there was no answer."""
        key = self._config.backend_api_key
        head = f"GET {path} HTTP/1.1\r\nhost: {backend.host_header.decode()}\r\n"
        head += f"authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                told, body = await self.exchange(backend, head.encode())
                return told.status, body
        except (UpstreamError, TimeoutError):
            return 0, b""

    @staticmethod
    async def exchange(backend: Backend, request: bytes, sent: bytes = b"") -> tuple[Head, bytes]:
        """Over a new connection, whole. Raises UpstreamError."""
        connection = await backend.pool.take(fresh=True)
        try:
            head, body = await connection.ask(request, sent), b""
            while part := await connection.read():
                body += part
            return head, body
        finally:
            backend.pool.give_back(connection)
