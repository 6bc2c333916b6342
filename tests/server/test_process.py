"""Start, drain and exit of a server process, with real signals."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.config.serve import ServeConfig
from quire.foundation.errors import ConfigError
from quire.server.http.listener import bind
from quire.server.processes import banner
from tests.server.conftest import echo_server
from tests.server.process import PATIENCE, ServerProcess, server_process, status_of, wait_until

ECHO = "tests.server.echo_process"
LONG = {"prompt": "hello", "max_tokens": 150, "stream": True}  # 4.5 s with ECHO_DELAY=0.03


class Reader(threading.Thread):
    """Reads one streamed completion in the background."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.lines: list[str] = []
        self.start()
        assert wait_until(lambda: bool(self.lines))

    def run(self) -> None:
        with httpx.stream("POST", f"{self.url}/v1/completions", json=LONG, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)

    @property
    def finish(self) -> str | None:
        """The finish reason, or the type of the error that ended the stream."""
        self.join(PATIENCE)
        assert self.lines[-1] == "data: [DONE]"
        last = json.loads(self.lines[-2].removeprefix("data: "))
        return last["error"]["type"] if "error" in last else last["choices"][0]["finish_reason"]


def start(*arguments: str, **environment: str) -> AbstractContextManager[ServerProcess]:
    return server_process(ECHO, "--port", "0", *arguments, **environment)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start("--enable-log-requests", "--shutdown-timeout", "600") as process:
        assert process.url
        yield process


def test_what_is_printed_is_short_and_the_curl_line_works(server: ServerProcess) -> None:
    """First of those with this server."""
    url = server.url
    assert wait_until(lambda: any("curl" in line for line in server.out))
    assert len(server.out) + len(server.err) <= 15
    curl = next(line for line in server.out if "curl" in line)
    body = curl.partition("-d '")[2].rpartition("'")[0]
    response = httpx.post(curl.split()[1], content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200
    assert response.json()["model"] == httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    assert any("seconds" in line or " s: " in line for line in server.out)


def test_who_cannot_print_that_he_is_ready_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banner, "ready_lines", lambda *_: ["Ready"])
    nothing: Any = None
    with open("/dev/full", "w", encoding="utf-8") as full, contextlib.redirect_stdout(full):
        banner.tell_ready(nothing, nothing, nothing, False, {}, 0.0)
        with contextlib.suppress(OSError):
            full.close()  # what it holds is lost


def test_probes_answer_while_loading_and_sigterm_then_ends_it() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with server_process(ECHO, "--port", str(port), ECHO_START="60") as server:
        url = f"http://127.0.0.1:{port}"
        assert wait_until(lambda: status_of(f"{url}/livez") == 200)
        assert status_of(f"{url}/readyz") == 503
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_sigterm_finishes_what_runs_and_takes_nothing_new() -> None:
    with start(ECHO_DELAY="0.03") as server:
        url = server.url
        reader = Reader(url)
        server.signal(signal.SIGTERM)
        assert wait_until(lambda: status_of(f"{url}/readyz") == 503)
        assert wait_until(lambda: "drain begins" in "".join(server.err))
        short = {"prompt": "hello", "max_tokens": 1}  # one that comes just now may still be taken
        assert wait_until(lambda: httpx.post(f"{url}/v1/completions", json=short).status_code == 503)
        assert reader.finish == "length"
        assert len(reader.lines) == 151
        assert server.exit_code() == 0
        assert wait_until(lambda: "drain ends after" in server.err[-1])
        assert "SIGTERM came" in server.err[-3]
        assert "drain begins: 1 requests run (grace 0 s, limit 30 s)" in server.err[-2]
        assert "Traceback" not in "".join(server.err)


def test_during_the_grace_new_requests_are_still_taken() -> None:
    with start("--shutdown-grace", "3", ECHO_DELAY="0.001") as server:
        url = server.url
        server.signal(signal.SIGTERM)
        assert wait_until(lambda: status_of(f"{url}/readyz") == 503)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
        assert server.exit_code() == 0


@pytest.mark.parametrize("how", ["timeout", "second SIGTERM", "SIGINT"])
def test_what_does_not_finish_is_aborted_and_told_so(how: str) -> None:
    timeout = "0.3" if how == "timeout" else "60"
    with start("--shutdown-timeout", timeout, ECHO_DELAY="0.1") as server:
        reader = Reader(server.url)
        server.signal(signal.SIGINT if how == "SIGINT" else signal.SIGTERM)
        if how == "second SIGTERM":
            assert wait_until(lambda: status_of(f"{server.url}/readyz") == 503)
            server.signal(signal.SIGTERM)
        assert reader.finish == "ServiceUnavailableError"
        assert server.exit_code() == 0
        reason = "the limit of 0.3 s is over" if how == "timeout" else "told to stop at once"
        assert wait_until(lambda: f"{reason}, 1 requests are aborted" in "".join(server.err)), server.err


def test_a_dead_engine_ends_the_process_with_an_error() -> None:
    with start(ECHO_DELAY="0.1") as server:
        reader = Reader(server.url)
        server.signal(signal.SIGUSR1)
        assert reader.finish == "ServiceUnavailableError"
        assert server.exit_code() == 4
        assert "the worker was killed" in "".join(server.err)


@pytest.mark.parametrize(("failure", "code"), [("config", 2), ("memory", 3)])
def test_a_failed_start_is_three_lines_and_an_exit_code(failure: str, code: int) -> None:
    with start(ECHO_FAIL=failure) as server:
        assert server.exit_code() == code
        assert wait_until(lambda: len(server.err) >= 3)
        assert len(server.err) == 3, server.err
        assert server.err[0].startswith("quire: error: ")


def test_a_busy_port_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with server_process(ECHO, "--port", str(taken.getsockname()[1])) as server:
            assert server.exit_code() == 2
            assert wait_until(lambda: "cannot listen" in "".join(server.err))
            assert "in use" in "".join(server.err)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.key and a.pem, b.key and b.pem, and locked.key, which is a.key with a password."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    folder = tmp_path_factory.mktemp("tls")
    new = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {0}.key -out {0}.pem"
    for command in (
        new.format("a"),
        new.format("b"),
        "openssl rsa -in a.key -aes128 -passout pass:x -out locked.key",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(
    ("key", "certificate", "words"),
    [
        ("b.key", "a.pem", "do not go together"),
        ("locked.key", "a.pem", "is encrypted"),
        ("a.pem", "a.key", "cannot be used"),
    ],
)
def test_certificates_that_cannot_be_used_are_refused(
    certificates: Path, key: str, certificate: str, words: str
) -> None:
    files = {"ssl_keyfile": str(certificates / key), "ssl_certfile": str(certificates / certificate)}
    with pytest.raises(ConfigError, match=words):
        bind(ServeConfig(port=0, **files))


def test_tls(certificates: Path) -> None:
    files = {"ssl_keyfile": str(certificates / "a.key"), "ssl_certfile": str(certificates / "a.pem")}
    with echo_server(**files) as served:
        trusted = ssl.create_default_context(cafile=str(certificates / "a.pem"))
        url = served.url.replace("http://127.0.0.1", "https://localhost")
        assert httpx.get(f"{url}/v1/models", verify=trusted, timeout=PATIENCE).status_code == 200


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    for _ in range(2):  # the second start finds the file that the first one left
        with server_process(ECHO, "--uds", str(path)) as server:
            assert wait_until(lambda server=server: any("Ready" in line for line in server.out))  # type: ignore[misc]
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
                assert client.get("http://localhost/v1/models").status_code == 200
            server.process.kill()
            server.process.wait()


def test_keys_guard_a_served_model(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with start("--api-key-file", str(keys)) as server:
        url = server.url
        assert status_of(f"{url}/v1/models") == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert "secret" not in "".join(server.out + server.err)


def test_an_idle_server_sleeps(server: ServerProcess) -> None:
    measured = psutil.Process(server.process.pid)
    used, seconds = cpu_seconds(measured), 3.0
    wait_until(lambda: False, seconds)
    # 10 % of a core would be a busy loop; a sleeping server takes well below 1 %.
    assert cpu_seconds(measured) - used < 0.1 * seconds


def cpu_seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def test_the_request_log_holds_ids_and_lengths_and_never_text(server: ServerProcess) -> None:
    body = {"prompt": "private words", "request_id": "abc", "max_tokens": 4}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert wait_until(lambda: any("cmpl-abc: finished with 4 tokens" in line for line in server.err))
    assert any("cmpl-abc: 13 prompt tokens" in line for line in server.err)
    assert "private" not in "".join(server.err)


def test_sigterm_with_idle_connections_ends_at_once(server: ServerProcess) -> None:
    """Last of those with this server."""
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/livez").status_code == 200  # stays connected
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
