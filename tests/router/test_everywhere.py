"""What changes a server reaches all of them, and who has not done it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import HTTPServer
from typing import Any

import httpx
import pytest

from quire.config.route import RouteConfig
from quire.router import everywhere
from quire.router.backend import Backend
from quire.router.choose import Chooser
from quire.router.everywhere import PATHS
from quire.router.fleet import Fleet
from tests.router.test_router import Adapted, backends, router
from tests.server.process import wait_until


class Changing(Adapted):
    """Keeps what it was asked for."""

    status = 200
    success = True

    def setup(self) -> None:
        super().setup()
        self.asked: list[tuple[str, bytes, str | None]] = self.server.asked  # type: ignore[attr-defined]

    def do_POST(self) -> None:  # noqa: N802 - as the library calls it
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, content, self.headers["Authorization"]))
        self._answer(self.status, {"success": self.success})


@contextlib.contextmanager
def changing(count: int, **last: Any) -> Iterator[tuple[str, list[Any]]]:
    """The router's URL, and its servers. last: what the last of them is like."""
    with contextlib.ExitStack() as stack:
        servers: list[Any] = []
        for number in range(count):
            own = {"told": ("base",)} | (last if number == count - 1 else {})
            server: Any = HTTPServer(("127.0.0.1", 0), type("Own", (Changing,), own))
            server.asked = []
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            servers.append(server)
        url = stack.enter_context(router(*(f"http://127.0.0.1:{server.server_port}" for server in servers)))
        yield url, servers


def test_all_servers_are_asked_the_same() -> None:
    with changing(3) as (url, servers):
        body = json.dumps({"lora_name": "a", "lora_path": "/a"}).encode()
        for path in sorted(PATHS):
            answer = httpx.post(f"{url}{path}?level=1", content=body, headers={"Authorization": "Bearer x"}, timeout=20)
            assert (answer.status_code, answer.json()) == (200, {"success": True})
            for server in servers:
                assert server.asked.pop() == (f"{path}?level=1", body, "Bearer x")
        assert not any(server.asked for server in servers), "each once"


def test_a_loaded_adapter_is_a_model_of_the_router_soon() -> None:
    with changing(1) as (url, servers):
        assert httpx.post(f"{url}/v1/load_lora_adapter", json={}, timeout=20).status_code == 200
        servers[0].RequestHandlerClass.told = ("base", "a")
        assert wait_until(lambda: "a" in backends(url)[0]["models"], 5)


@pytest.mark.parametrize(
    ("last", "said"), [({"status": 400}, '400 {"success": true}'), ({"success": False}, '200 {"success": false}')]
)
def test_who_has_not_done_it_is_told(last: dict[str, Any], said: str) -> None:
    with changing(3, **last) as (url, servers):
        answer = httpx.post(f"{url}/reset_prefix_cache", timeout=20)
        assert answer.status_code == 502
        error = answer.json()["error"]
        assert error["type"] == "partial_failure"
        where = f"http://127.0.0.1:{servers[2].server_port}"
        assert error["message"] == f"/reset_prefix_cache: done by 2 of 3 servers. Not by {where}: {said}"
        assert len(answer.json()["servers"]) == 3
        servers[2].shutdown()
        servers[2].server_close()
        gone = httpx.post(f"{url}/reset_prefix_cache", timeout=20).json()["error"]["message"]
        assert f"done by 2 of 3 servers. Not by {where}: it takes no connection" in gone


def test_what_all_refuse_alike_is_their_own_answer() -> None:
    with changing(1, status=404) as (url, _):
        answer = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "a"}, timeout=20)
        assert (answer.status_code, answer.json()) == (404, {"success": True})


def test_a_server_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everywhere, "PATIENCE", 0.05)
    config = RouteConfig(backend=["http://127.0.0.1:1"])

    class Slow(Fleet):
        @staticmethod
        async def exchange(*_arguments: Any) -> Any:
            await asyncio.sleep(20)

    async def main() -> list[dict[str, Any]]:
        fleet = Slow(config, Chooser(config))
        fleet._backends["http://127.0.0.1:1"] = backend = Backend("http://127.0.0.1:1", config)
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"path": "/sleep", "raw_path": b"/sleep", "query_string": b"", "headers": [], "method": "POST"}
        await everywhere.Everywhere(fleet, Chooser(config), 100)(scope, receive, send)  # type: ignore[arg-type]
        assert backend.in_flight == 0
        return sent

    start, body = asyncio.run(main())
    assert start["status"] == 502
    assert b"done by 0 of 1 servers" in body["body"]
    assert b"has not answered for 0.05 seconds" in body["body"]
