from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from quire.config.serve import ServeConfig
from quire.server.app import build_app, protect
from quire.server.http.listener import bind
from quire.server.http.protocol import HttpConfig
from quire.server.http.server import HttpServer
from quire.server.service import Service
from tests.server.echo_llm import EchoLLM
from tests.server.process import PATIENCE, wait_until


@dataclass
class Served:
    url: str
    llm: EchoLLM
    service: Service
    client: httpx.Client
    http: HttpServer

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def wait_until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        return wait_until(condition, seconds)


@contextlib.contextmanager
def echo_server(llm: EchoLLM | None = None, keys: tuple[str, ...] = (), **serve_options: Any) -> Iterator[Served]:
    """The real HTTP stack on a socket of this process, in front of the echo engine."""
    llm = llm or EchoLLM(served_model_name=["echo"])
    serve = ServeConfig(port=0, uvicorn_log_level="critical", **serve_options)
    service = Service(llm.info.resolved.config, serve)
    service.attach(llm)  # type: ignore[arg-type]
    listener = bind(serve)
    http = HttpServer(HttpConfig(protect(build_app(service), service, keys), serve))
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener])), daemon=True)
    thread.start()
    host, port = listener.getsockname()
    url = f"http://{host}:{port}"
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        try:
            yield Served(url, llm, service, client, http)
        finally:
            http.should_exit = True
            thread.join(10)


@pytest.fixture(scope="module")
def echo() -> Iterator[Served]:
    with echo_server() as served:
        yield served
