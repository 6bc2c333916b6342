"""Connections as bad clients, slow ones and other people's libraries make them, on raw sockets."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.http import limits
from tests.server.conftest import Served, echo_server
from tests.server.echo_llm import EchoLLM
from tests.server.process import PATIENCE, send_raw

BODY = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\n"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """Short time limits."""
    limits = dict.fromkeys(("header_timeout", "body_timeout", "send_timeout", "timeout_keep_alive"), 0.8)
    with echo_server(EchoLLM(served_model_name=["echo"]), **limits) as served:
        yield served


def connect(served: Served) -> socket.socket:
    return socket.create_connection(served.address, timeout=PATIENCE)


def head(length: int = len(BODY), extra: bytes = b"") -> bytes:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return start + extra + b"Content-Length: %d\r\n\r\n" % length


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


# -- upgrades ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["with the head", "after the head", "byte by byte"])
def test_a_wish_to_upgrade_does_not_cost_the_body(echo: Served, where: str) -> None:
    with connect(echo) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = head(extra=H2C) + BODY
        cuts = {"with the head": [len(request)], "after the head": [len(request) - len(BODY), len(request)]}
        sent = 0
        for end in cuts.get(where, range(1, len(request) + 1)):
            connection.sendall(request[sent:end])
            sent = end
        first = b""
        while b'"text":"hell"' not in first:
            piece = connection.recv(65536)
            assert piece, first
            first += piece
        # A second and a third one at once, on the same connection: it is still HTTP/1.1.
        connection.sendall(request + head(extra=H2C + b"X-Request-Id: last\r\n").replace(b"hello", b"other") + BODY)
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 2 or b'"cmpl-last"' not in answer:
            piece = connection.recv(65536)
            assert piece, answer
            answer += piece
    assert first.startswith(b"HTTP/1.1 200"), first


def test_an_upgrade_without_a_body_and_connect(echo: Served) -> None:
    with connect(echo) as connection:
        connection.sendall(
            b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 200")  # "close" is still heard
    with connect(echo) as connection:
        connection.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 4")
    assert echo.client.get("/livez").status_code == 200


JAVA = """
import java.net.URI;
import java.net.http.*;

public class Ask {
    public static void main(String[] a) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 0; i < 3; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(a[0] + "/v1/completions"))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(a[1])).build();
            HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(response.version() + " " + response.statusCode() + " " + response.body());
        }
    }
}
"""


@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
def test_the_client_of_java_is_answered(echo: Served, tmp_path: Path) -> None:
    file = tmp_path / "Ask.java"
    file.write_text(JAVA)
    done = subprocess.run(
        ["java", "-XX:TieredStopAtLevel=1", str(file), echo.url, BODY.decode()],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    assert all(line.startswith("HTTP_1_1 200 ") and '"text":"hell"' in line for line in lines), lines


# -- slow and silent clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"", b""),  # nothing was asked, nothing is answered
        (b"GET /livez HT", b"HTTP/1.1 408"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: b", b"HTTP/1.1 408"),
        (head(100), b"HTTP/1.1 408"),
        (head(100) + b"{", b"HTTP/1.1 408"),
        (head(100, H2C) + b"{", b"HTTP/1.1 408"),
    ],
)
def test_who_stops_in_the_middle_is_not_waited_for(hasty: Served, sent: bytes, says: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert answer[:12] == says, answer
    assert bool(says) == (b"x-request-id: " in answer)


@pytest.mark.parametrize("start", [b"GET /livez HTTP/1.1\r\nX-A: ", head(1_000_000)])
def test_a_drip_is_no_progress(hasty: Served, start: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(start)
        connection.settimeout(0.05)
        answer = b""
        for _ in range(200):
            try:
                connection.sendall(b"a")
                answer = connection.recv(4096)
                break
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408"), answer


def test_an_idle_connection_is_closed_after_an_answer(hasty: Served) -> None:
    with connect(hasty) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_loses_its_seat(hasty: Served, stream: bool) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(hasty.address)
        body = json.dumps({"prompt": "hello " * 50, "max_tokens": 3500, "n": 64, "stream": stream}).encode()
        aborted = len(hasty.llm.aborted)
        connection.sendall(head(len(body)) + body)
        assert hasty.wait_until(lambda: bool(hasty.llm.running))
        if stream:
            assert hasty.wait_until(lambda: len(hasty.llm.aborted) == aborted + 1)
        # A whole answer is made before the first byte of it is there to be read.
        assert hasty.wait_until(lambda: hasty.client.get("/load").json() == {"server_load": 0})
        assert hasty.wait_until(lambda: not hasty.llm.running and not connections(hasty))


def connections(served: Served) -> int:
    """Bytes that the server still keeps for clients, counted by connection."""
    return sum(bool(one.transport.get_write_buffer_size()) for one in served.http.server_state.connections)


def test_a_stream_may_pause_for_longer_than_any_limit(hasty: Served) -> None:
    hasty.llm.delay = 1.0
    try:
        body = {"prompt": "hello", "max_tokens": 2, "stream": True}
        assert hasty.client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        slow = hasty.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        assert slow.status_code == 200
    finally:
        hasty.llm.delay = 0.0


def test_an_upload_that_breaks_off_is_one_line(echo: Served, caplog: pytest.LogCaptureFixture) -> None:
    loggers = [logging.getLogger(name) for name in ("quire", "uvicorn.error")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
        logger.setLevel(logging.INFO)
    try:
        with connect(echo) as connection:
            connection.sendall(head(1000, b"Expect: 100-continue\r\n"))
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")  # somebody reads now
            connection.sendall(b'{"prompt": "hel')
        assert echo.wait_until(lambda: bool(caplog.records))
        echo.client.get("/livez")
    finally:
        for logger in loggers:
            logger.removeHandler(caplog.handler)
    mine = {record.getMessage(): record.exc_info for record in caplog.records}
    assert mine == {"POST /v1/completions: the client left before its body was complete": None}


def test_a_refused_body_may_be_sent_to_its_end_and_the_refusal_is_there() -> None:
    """Many clients write all that they have before they read; to none of it the connection is reset."""
    with echo_server(max_body_bytes=1000) as served, connect(served) as connection:
        connection.sendall(head(5_000_000))
        for _ in range(50):
            connection.sendall(b"x" * 100_000)
            time.sleep(0.002)
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")


def test_a_refused_body_that_does_not_end_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEISURE_SECONDS", 0.2)
    with echo_server(max_body_bytes=1000) as served:
        for expect in (b"", b"Expect: 100-continue\r\n"):
            with connect(served) as connection:
                connection.sendall(head(5_000_000, expect))
                assert read_all(connection).startswith(b"HTTP/1.1 413 ")
        assert served.client.get("/livez").status_code == 200


# -- every reply -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "mine-1", "a\tb", "x" * 300])
def test_every_reply_has_a_request_id(given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    with echo_server(keys=("secret",), max_body_bytes=1000, enable_docs=True, allowed_origins=["*"]) as served:
        http, known = served.client, {"Authorization": "Bearer secret"}
        completion = {"prompt": "a", "max_tokens": 2}
        replies = [http.get(path, headers=headers) for path in ("/livez", "/readyz", "/health", "/v1/models")]
        both = headers | known
        replies += [http.get(path, headers=both) for path in ("/v1/models", "/docs", "/openapi.json", "/nothing")]
        replies += [http.get(path, headers=both) for path in ("/v1/completions", "/metrics", "/version")]
        for body in (completion, completion | {"stream": True}, {"prompt": 1.5}, {"prompt": "a" * 2000}):
            replies.append(http.post("/v1/completions", json=body, headers=both))
        served.llm._answer = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        replies.append(http.post("/v1/completions", json=completion, headers=both))
        preflight = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
        replies.append(http.options("/v1/completions", headers=headers | preflight))
        of_anthropic = [http.post("/v1/messages", headers=headers)]  # no key
        wrong: list[Any] = [{"prompt": "a" * 2000}, {"model": "x"}, {"model": "x", "max_tokens": 1, "messages": [{}]}]
        of_anthropic += [http.post("/v1/messages", json=body, headers=both) for body in wrong]
        of_anthropic += [http.head("/v1/messages", headers=both), http.get("/v1/messages/x", headers=both)]
        of_anthropic.append(http.get("/v1/models", headers=both | {"anthropic-version": "2023-06-01"}))
    replies += of_anthropic
    for reply in replies:
        same = [reply.headers["x-request-id"]] if reply in of_anthropic else []
        assert reply.headers.get_list("request-id") == same, reply.request.url
    statuses = {reply.status_code for reply in replies}
    assert statuses == {200, 400, 401, 404, 405, 413, 500}, statuses
    for reply in replies:
        ids = reply.headers.get_list("x-request-id")
        assert len(ids) == 1, (reply.request.url, reply.status_code, ids)
        assert ids[0] == given if given == "mine-1" else ids[0].startswith("req_")
    if given is None:
        assert len({reply.headers["x-request-id"] for reply in replies}) == len(replies)


def test_request_ids_can_be_left_out() -> None:
    with echo_server(enable_request_id_headers=False) as served:
        reply = served.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "a"})
        assert "x-request-id" not in reply.headers


def test_head_is_get_without_a_body(echo: Served) -> None:
    for path in ("/health", "/livez", "/readyz", "/startupz", "/ping", "/version", "/load", "/metrics", "/v1/models"):
        got, headed = echo.client.get(path), echo.client.head(path)
        assert headed.status_code == got.status_code == 200, path
        assert headed.headers["content-length"] == got.headers["content-length"] or path == "/metrics"
        assert headed.content == b""
    assert echo.client.head("/v1/completions").status_code == 405
    # Nothing of a body is on the wire: the next answer follows at once.
    with connect(echo) as connection:
        connection.sendall(b"HEAD /version HTTP/1.1\r\nHost: x\r\n\r\nGET /livez HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = read_all(connection)
    assert answer.split(b"\r\n\r\n")[1].startswith(b"HTTP/1.1 200"), answer


def test_what_is_no_http_gets_one_error(echo: Served) -> None:
    with connect(echo) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 400


def test_a_body_may_come_as_slowly_as_the_server_reads(hasty: Served) -> None:
    """While another answer is made on the same connection, the next body is not read, and its time does not run."""
    hasty.llm.delay = 0.3
    try:
        connection = send_raw(hasty.url, "/v1/completions", prompt="hello", max_tokens=5)
        with connection:
            connection.sendall(head() + BODY[:5])
            answer = connection.recv(65536)
            connection.sendall(BODY[5:])
            while answer.count(b"HTTP/1.1 200") < 2:
                piece = connection.recv(65536)
                assert piece, answer
                answer += piece
    finally:
        hasty.llm.delay = 0.0
    assert httpx.get(f"{hasty.url}/livez").status_code == 200


# -- HTTP/1.0 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alive", [b"", b"Connection: keep-alive\r\n"])
@pytest.mark.parametrize("stream", [True, False])
def test_clients_of_http_1_0_get_no_chunks(echo: Served, alive: bytes, stream: bool) -> None:
    """nginx speaks 1.0 to its upstreams unless it is told otherwise. The end of the connection is that of the reply."""
    body = json.dumps({"prompt": "hello", "max_tokens": 4, "stream": stream}).encode()
    with connect(echo) as connection:
        connection.sendall(head(len(body), alive).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        headers, _, content = read_all(connection).partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200"), headers
    assert b"transfer-encoding" not in headers.lower()
    assert (b"content-length: %d" % len(content) in headers.lower()) is not stream
    if stream:
        assert content.startswith(b"data: {")
        assert content.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(content)["choices"][0]["text"] == "hell"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/dashboard", "/nothing"])
def test_http_1_0_gets_what_http_1_1_gets(echo: Served, path: str) -> None:
    with connect(echo) as connection:
        connection.sendall(b"GET %b HTTP/1.0\r\n\r\n" % path.encode())
        headers, _, content = read_all(connection).partition(b"\r\n\r\n")
    same = echo.client.get(path)
    assert int(headers.split()[1]) == same.status_code
    assert b"transfer-encoding" not in headers.lower()
    assert len(content) == len(same.content) or path == "/metrics"
