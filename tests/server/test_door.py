"""The door over HTTP: who is refused, how, and what is not done for whom nobody waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fastapi.routing import APIRoute

from quire.frontend.async_engine import Outage
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.server.app import ROUTERS
from quire.server.http.entry import ENGINE_ROUTES
from quire.server.processes.shared_counters import UNSEEN
from quire.types.output import QueueClass, QueueStats
from tests.server.conftest import Served, echo_server
from tests.server.echo_llm import EchoLLM
from tests.server.process import PATIENCE

# Needs no engine, or asks for nothing new.
OTHERS = {
    "/ping", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens",
    "/v1/responses/{response_id}/cancel", "/v1/batches", "/v1/batches/{batch_id}/cancel", "/v1/files",
    "/v1/chat/completions/render", "/v1/completions/render", "/v1/chat/completions/derender",
    "/v1/completions/derender",
}  # fmt: skip
BODY = {"prompt": "hello", "max_tokens": 2}


def queue(waiting: int, priority: int = 0, seats_per_second: float = 10.0) -> QueueStats:
    classes = [QueueClass(priority, waiting, 0, 8)]
    return QueueStats(classes=classes, seats_per_second=seats_per_second, as_of=time.monotonic())


@pytest.fixture
def served() -> Iterator[Served]:
    with echo_server(EchoLLM(served_model_name=["echo"], max_queue_seconds=5.0)) as served:
        yield served


def tell(served: Served, queue: QueueStats) -> None:
    assert served.service.door is not None
    served.service.door.report(queue)


def test_every_route_is_behind_the_door_or_needs_no_engine() -> None:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    posts = {route.path for route in routes if "POST" in route.methods}
    assert posts == ENGINE_ROUTES | OTHERS
    assert not ENGINE_ROUTES & OTHERS


@pytest.mark.parametrize("path", sorted(ENGINE_ROUTES))
def test_a_wait_that_is_too_long_is_503_before_the_body_is_looked_into(served: Served, path: str) -> None:
    tell(served, queue(100))
    answer = served.client.post(path, content=b"no JSON, and nobody looks")
    assert answer.status_code == (529 if path == "/v1/messages" else 503)
    assert answer.headers["retry-after"] == "11"  # 101 places at 10 a second
    assert "about 10 s" in answer.text
    assert served.service.metrics is not None
    assert served.service.metrics.total_rejected == 1
    tell(served, queue(10))
    assert served.client.post(path, content=b"no JSON").status_code == 400
    assert served.service.counters.sum(UNSEEN) == 0  # a request that fails before the engine leaves no trace


def test_what_was_let_in_counts_until_the_engine_has_told_of_it(served: Served) -> None:
    door = served.service.door
    assert door is not None
    tell(served, queue(45))
    statuses = [served.client.post("/v1/completions", json=BODY).status_code for _ in range(8)]
    assert statuses == [200] * 5 + [503] * 3  # 5 s are 50 places
    tell(served, queue(0))
    assert served.client.post("/v1/completions", json=BODY).status_code == 200
    assert door.wait() == pytest.approx(0.2)


def test_the_predicted_wait_is_a_gauge(served: Served) -> None:
    tell(served, queue(29))
    lines = served.client.get("/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith("quire:queue_wait_seconds{")]
    assert float(line.split()[-1]) == pytest.approx(3.0)


def test_a_better_priority_does_not_wait_for_worse_ones() -> None:
    with echo_server(EchoLLM(max_queue_seconds=5.0, scheduling_policy="priority")) as served:
        tell(served, queue(100, priority=3))
        found = {p: served.client.post("/v1/completions", json=BODY | {"priority": p}).status_code for p in (0, 3, 9)}
        assert found == {0: 200, 3: 503, 9: 503}
        assert served.client.post("/v1/completions", content=b'{"priority": 3').status_code == 400  # and no refusal


def test_no_limit_refuses_nobody() -> None:
    with echo_server(EchoLLM(max_queue_seconds=0.0)) as served:
        tell(served, queue(100_000))
        assert served.client.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize("size", [10, 40_000])
def test_nothing_is_done_for_clients_that_have_gone(served: Served, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """They hang up while the event loop is busy elsewhere: their requests are read only afterwards."""
    encoded: list[str] = []
    is_busy, have_left = threading.Event(), threading.Event()

    def encode_batch(_self: Tokenizer, texts: Sequence[str], *_: Any, **__: Any) -> list[list[int]]:
        if not encoded:
            is_busy.set()
            have_left.wait(PATIENCE)  # on the event loop: nothing else is seen meanwhile
        encoded.extend(texts)
        return [[1, 2, 3] for _ in texts]

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    blocker = send(served, "the first", 10)
    assert is_busy.wait(PATIENCE)
    for _ in range(5):
        send(served, "gone", size).close()
    have_left.set()
    assert b"200 OK" in blocker.recv(1000)
    blocker.close()
    assert served.client.post("/v1/completions", json=BODY).status_code == 200
    assert [text.split("|")[0] for text in encoded] == ["the first", "hello"]


def send(served: Served, text: str, size: int) -> socket.socket:
    connection = socket.create_connection(served.address, timeout=PATIENCE)
    body = (b'{"max_tokens": 1, "prompt": "%b|' % text.encode()) + b"x" * size + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    connection.sendall(head % len(body) + body)
    return connection


def test_while_an_engine_starts_again_requests_wait_but_not_too_long_nor_too_many() -> None:
    llm = EchoLLM(served_model_name=["echo"], max_queue_seconds=30.0, max_num_queued_reqs=3)
    with echo_server(llm) as served:
        assert served.client.post("/v1/completions", json=BODY).status_code == 200
        tell(served, queue(1))
        served.llm.outage = Outage("the core was killed", time.monotonic(), expected=20.0)
        for path in ("/health", "/readyz"):
            answer = served.client.get(path)
            assert answer.status_code == 503
            assert "is being started again" in answer.json()["error"]["message"]
        assert served.client.get("/livez").status_code == 200
        assert served.client.post("/v1/completions", json=BODY).status_code == 200  # it gets to the engine
        assert served.client.post("/v1/completions", json=BODY).status_code == 200
        full = served.client.post("/v1/completions", json=BODY)
        assert full.status_code == 503
        assert "the core was killed" in full.text
        assert 15 < int(full.headers["retry-after"]) <= 21
        tell(served, queue(0))
        served.llm.outage = Outage("the core was killed", time.monotonic(), expected=90.0)
        assert served.client.post("/v1/completions", json=BODY).status_code == 503
        served.llm.outage = None
        assert served.client.get("/readyz").status_code == 200
        assert served.client.post("/v1/completions", json=BODY).status_code == 200
