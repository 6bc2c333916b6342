"""`quire route` before real servers: what they answer comes through byte for byte, and one that dies is not missed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import anthropic
import httpx
import openai
import pytest

from quire.config.route import RouteConfig
from quire.foundation.errors import ConfigError
from quire.router.backend import Backend, Breaker, check_url
from quire.router.choose import Chooser
from quire.router.discovery import DnsSource, KubernetesSource, read_backends
from quire.router.prompt import ENDS, read_wish
from tests.server.process import ServerProcess, server_process, wait_until

MODEL = "quire-demo"


@contextlib.contextmanager
def echo_servers(count: int, tmp: Any, delay: float = 0.0, *options: str) -> Iterator[list[ServerProcess]]:
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(
                server_process(
                    "tests.server.echo_process", "--port", "0", "--batch-dir", str(tmp / str(number)), *options,
                    ECHO_DELAY=str(delay),
                )
            )
            for number in range(count)
        ]  # fmt: skip
        assert all(one.url for one in made)
        yield made


@contextlib.contextmanager
def router(*urls: str, **options: Any) -> Iterator[str]:
    """Its URL, once its backends are ready."""
    arguments = ["route", "--port", "0", "--health-interval", "0.2"]
    for url in urls:
        arguments += ["--backend", url]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    with server_process("quire.cli.main", *arguments) as process:
        url = process.url
        assert wait_until(lambda: [each["ready"] for each in backends(url)] == [True] * len(urls), 30), process.err
        yield url
        process.signal(signal.SIGTERM)
        assert process.exit_code(20) == 0
        assert "Traceback" not in "".join(process.err), process.err


def backends(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/router/backends", timeout=20).json()["backends"]
    return found


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    with echo_servers(2, tmp_path_factory.mktemp("batches")) as made:
        yield made


@pytest.fixture(scope="module")
def routed(pair: list[ServerProcess]) -> Iterator[str]:
    with router(*(one.url for one in pair)) as url:
        yield url


# -- what comes through ------------------------------------------------------------------------------------------


def essence(response: httpx.Response) -> tuple[int, list[tuple[str, str]], bytes]:
    varying = {"date", "x-request-id"}
    headers = [(name, value) for name, value in response.headers.items() if name not in varying]
    return response.status_code, sorted(headers), response.content


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "/v1/completions", json.dumps(body("Hello", request_id="one")).encode()),
        ("POST", "/v1/completions", json.dumps(body("Hello", stream=True, request_id="two")).encode()),
        ("POST", "/v1/completions", b'{"model": "nobody", "prompt": "x"}'),
        ("POST", "/v1/completions", b"{not json"),
        ("POST", "/tokenize", json.dumps({"model": MODEL, "prompt": "Grüße " * 5000}).encode()),
        ("GET", "/version", b""),
        ("GET", "/nothing?like=this", b""),
        ("HEAD", "/version", b""),
    ],
)
def test_answers_come_byte_for_byte(
    routed: str, pair: list[ServerProcess], method: str, path: str, content: bytes
) -> None:
    headers = {"content-type": "application/json"}
    there, here = (
        httpx.request(method, url + path, content=content, headers=headers, timeout=20) for url in (pair[0].url, routed)
    )
    (status, names, said), (status_here, names_here, said_here) = essence(there), essence(here)
    assert (status_here, names_here) == (status, names)
    assert _timeless(said_here) == _timeless(said)


def test_clients_of_http_1_0_get_no_chunks(routed: str) -> None:
    """As nginx before it."""
    host, _, port = routed.removeprefix("http://").partition(":")
    content = json.dumps(body("Hello", stream=True)).encode()
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head % len(content) + content)
        with connection.makefile("rb") as file:
            headers, _, said = file.read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    assert said.startswith(b"data: {")
    assert said.endswith(b"data: [DONE]\n\n")


def _timeless(content: bytes) -> Any:
    """Without the second in which it was said."""
    lines = content.split(b"\n\n")
    return [b",".join(p for p in line.split(b",") if not p.startswith(b'"created"')) for line in lines]


def test_official_clients_do_not_notice(routed: str) -> None:
    client = openai.OpenAI(base_url=f"{routed}/v1", api_key="x", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    chat: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
    whole = client.chat.completions.create(**chat).choices[0].message.content
    parts = [event.choices[0].delta.content or "" for event in client.chat.completions.create(**chat, stream=True)]
    assert "".join(parts) == whole
    messages = anthropic.Anthropic(base_url=routed, api_key="x", max_retries=0).messages
    assert messages.create(model=MODEL, max_tokens=6, messages=chat["messages"]).content


def test_stored_things_are_found_again(routed: str) -> None:
    client = openai.OpenAI(base_url=f"{routed}/v1", api_key="x", max_retries=0)
    for _ in range(6):
        first = client.responses.create(model=MODEL, input="One", max_output_tokens=4)
        assert client.responses.retrieve(first.id).id == first.id
        then = client.responses.create(model=MODEL, input="Two", max_output_tokens=4, previous_response_id=first.id)
        assert then.previous_response_id == first.id
    file = client.files.create(file=("lines.jsonl", b"{}\n"), purpose="batch")
    assert client.files.retrieve(file.id).id == file.id
    assert file.id in [each.id for each in client.files.list()]


def test_sessions_and_prefixes_stay_where_they_are(routed: str) -> None:
    def counts() -> list[int]:
        return [each["requests"] for each in backends(routed)]

    with httpx.Client(base_url=routed, timeout=20) as client:
        before = counts()
        for number in range(8):
            client.post("/v1/completions", json=body(f"{number} is new"), headers={"X-Session-ID": "me"})
        after = counts()
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 8]
        prefix = "The same beginning of every prompt. " * 20
        for number in range(8):
            client.post("/v1/completions", json=body(prefix + str(number)))
        assert sorted(b - a for a, b in zip(after, counts(), strict=True)) == [0, 8]


# -- servers come and go -----------------------------------------------------------------------------------------


def test_a_server_that_is_killed_is_not_missed_before_the_first_byte(tmp_path: Any) -> None:
    async def main(url: str, victim: ServerProcess) -> list[Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

            async def ask(number: int) -> Any:
                await asyncio.sleep(number * 0.01)
                return await client.post("/v1/completions", json=body(f"{number} asks", max_tokens=40))

            asked = [asyncio.create_task(ask(number)) for number in range(150)]
            while (await asyncio.to_thread(backends, url))[1]["in_flight"] < 2:
                await asyncio.sleep(0.01)
            victim.process.kill()
            return await asyncio.gather(*asked)

    with echo_servers(3, tmp_path, 0.02) as servers, router(*(one.url for one in servers)) as url:
        answers = asyncio.run(main(url, servers[1]))
        assert [answer.status_code for answer in answers] == [200] * 150
        metrics = httpx.get(f"{url}/metrics").text
        assert f'quire:router_retries_total{{backend="{servers[1].url}"}}' in metrics
        assert wait_until(lambda: not backends(url)[1]["ready"])
        # An answer that has begun cannot be given by another: it is broken off, and does not look whole.
        with httpx.stream("POST", f"{url}/v1/completions", json=body("x", max_tokens=400, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            for one in (servers[0], servers[2]):
                one.process.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)


class Adapted(BaseHTTPRequestHandler):
    """A server of some models, and of others that it has not told of yet."""

    told: tuple[str, ...] = ()
    has: tuple[str, ...] = ()

    def do_GET(self) -> None:
        listed = [{"id": name} for name in self.told]
        self._answer(200, {"data": listed} if self.path == "/v1/models" else {"server_load": 0})

    def do_POST(self) -> None:
        name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
        self._answer(200 if name in self.has else 404, {"port": self.server.server_port})

    def _answer(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: Any) -> None: ...


@contextlib.contextmanager
def adapted(told: tuple[str, ...], has: tuple[str, ...]) -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), type("Own", (Adapted,), {"told": told, "has": has}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_model_is_asked_of_all_who_may_have_it() -> None:
    """An adapter that was loaded a moment ago, one that nobody has, and one whose only server has gone."""
    with (
        adapted(("base",), ("base", "new")) as one,
        adapted(("base", "known"), ("base", "known")) as other,
        router(*(f"http://127.0.0.1:{server.server_port}" for server in (one, other))) as url,
    ):

        def ask(name: str) -> httpx.Response:
            return httpx.post(f"{url}/v1/completions", json={"model": name, "prompt": "x"}, timeout=20)

        assert {ask("new").json()["port"] for _ in range(6)} == {one.server_port}
        assert {ask("known").json()["port"] for _ in range(6)} == {other.server_port}
        assert {ask("base").json()["port"] for _ in range(6)} == {one.server_port, other.server_port}
        nobody = ask("nobody")
        assert nobody.status_code == 404
        assert "port" in nobody.json(), "as a server said it"
        other.shutdown()
        other.server_close()
        gone = ask("known")
        assert gone.status_code == 503
        assert "no server that has the model 'known' answers" in gone.json()["error"]["message"]
        assert ask("base").status_code == 200


def test_servers_are_added_drained_and_removed_by_hand(pair: list[ServerProcess]) -> None:
    one, two = (server.url for server in pair)
    with router(one, policy="round_robin") as url, httpx.Client(base_url=url, timeout=20) as client:
        assert client.post("/router/backends", json={"url": two}).json()["url"] == two
        assert wait_until(lambda: all(each["ready"] for each in backends(url)))
        for number in range(4):
            assert client.post("/v1/completions", json=body(str(number))).status_code == 200
        first, second = (each["requests"] for each in backends(url))
        assert first + second == 4
        assert second  # two each, if both answer probes in time all the while
        assert client.post(f"/router/drain?url={one}").json()["draining"]
        for number in range(3):
            client.post("/v1/completions", json=body(str(number)))
        assert [each["requests"] for each in backends(url)] == [first, second + 3]
        assert client.delete("/router/backends", params={"url": one}).status_code == 200
        assert [each["url"] for each in backends(url)] == [two]
        assert client.delete("/router/backends", params={"url": one}).status_code == 404
        assert client.post("/router/backends", json={"url": "ftp://x"}).status_code == 400
        assert client.get("/health").status_code == 200
        client.delete("/router/backends", params={"url": two})
        assert client.get("/health").status_code == 503


def test_an_operators_key(pair: list[ServerProcess]) -> None:
    with server_process(
        "quire.cli.main", "route", "--port", "0", "--backend", pair[0].url, "--admin-key", "s"
    ) as process:
        assert httpx.get(f"{process.url}/router/backends").status_code == 401
        answer = httpx.get(f"{process.url}/router/backends", headers={"Authorization": "Bearer s"})
        assert answer.json()["backends"][0]["url"] == pair[0].url


def test_bad_options_are_named() -> None:
    for url in ("https://x", "http://", "http://x:99999", "http://x/path", "dns://x", "kubernetes://a/b"):
        with pytest.raises(ConfigError, match="backend must be"):
            read_backends([url])
    with pytest.raises(ConfigError, match="max_attempts must be >= 1"):
        RouteConfig(max_attempts=0)
    assert check_url("http://[::1]:80/") == "http://[::1]:80"


# -- where servers are found -------------------------------------------------------------------------------------


def test_names_and_services_are_looked_up() -> None:
    assert "http://127.0.0.1:81" in asyncio.run(DnsSource("", "localhost", 81).urls())
    slices = {
        "items": [
            {"endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": False}}, {"addresses": ["fd00::2"]}]},
            {"endpoints": [{"addresses": ["10.0.0.3"], "conditions": {"terminating": True}}]},
            {"endpoints": None},
        ]
    }
    seen: list[str] = []

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            content = json.dumps(slices).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Api) as api:
        threading.Thread(target=api.serve_forever, daemon=True).start()
        source = KubernetesSource("", "models", "llama", 8000, f"http://127.0.0.1:{api.server_port}")
        assert asyncio.run(source.urls()) == {"http://10.0.0.1:8000", "http://[fd00::2]:8000"}
        assert seen == [
            "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dllama"
        ]
        api.shutdown()


# -- where a request goes ----------------------------------------------------------------------------------------


def fleet(count: int, **options: Any) -> tuple[Chooser, list[Backend]]:
    config = RouteConfig(**options)
    return Chooser(config), [Backend(f"http://10.0.0.{number}:80", config) for number in range(count)]


def test_a_prompt_is_found_in_any_api_whatever_stands_before_it() -> None:
    text = "x" * ENDS[3]
    one = read_wish("/v1/completions", json.dumps({"model": "m", "seed": 1, "prompt": text}).encode())
    two = read_wish("/v1/completions", json.dumps({"seed": 22, "model": "m", "prompt": text, "n": 3}).encode())
    assert len(one.hashes) == 4
    assert one.hashes[:4] == two.hashes[:4]
    assert one.model == "m"
    other = read_wish("/v1/completions", json.dumps({"model": "other", "prompt": text}).encode())
    assert other.hashes[0] != one.hashes[0]
    chat = {"max_tokens": 5, "system": text, "messages": [], "model": "m"}
    assert len(read_wish("/v1/messages", json.dumps(chat).encode()).hashes) >= 4
    assert read_wish("/v1/models", b"").hashes == ()


def test_a_prefix_draws_until_its_server_is_busy() -> None:
    chooser, servers = fleet(3)
    wish = read_wish("/v1/completions", json.dumps(body("y" * 4096)).encode())
    home = chooser.choose(servers, wish, None)
    assert home is not None
    chooser.note(wish, home)
    assert {chooser.choose(servers, wish, None) for _ in range(9)} == {home}
    home.in_flight = 64
    away = chooser.choose(servers, wish, None)
    assert away is not home
    chooser.forget(home)
    home.in_flight = 0
    assert len({chooser.choose(servers, wish, None) for _ in range(9)}) == 3


def test_only_servers_of_a_model_get_its_requests() -> None:
    chooser, servers = fleet(2)
    servers[0].models, servers[1].models = [{"id": "a"}], [{"id": "b"}]
    for model, server in (("a", servers[0]), ("b", servers[1])):
        wish = read_wish("/v1/completions", json.dumps({"model": model, "prompt": "x"}).encode())
        assert {chooser.choose(servers, wish, None) for _ in range(4)} == {server}


def test_a_session_moves_only_if_its_server_goes() -> None:
    chooser, servers = fleet(5)
    wish = read_wish("/v1/completions", b"{}")
    homes = {name: chooser.choose(servers, wish, name) for name in map(str, range(50))}
    assert len(set(homes.values())) == 5
    left = servers[1:]
    assert all(chooser.choose(left, wish, name) is home for name, home in homes.items() if home in left)


def test_a_breaker_opens_and_lets_a_probe_in() -> None:
    breaker = Breaker(2, 0.01)
    breaker.fail()
    assert not breaker.is_open
    breaker.fail()
    assert breaker.is_open
    assert wait_until(lambda: breaker.may_probe, 5)
    breaker.succeed()
    assert not breaker.is_open
    breaker.fail(at_once=True)
    assert breaker.is_open
