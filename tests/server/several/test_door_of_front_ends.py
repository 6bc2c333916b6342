"""The door of `quire serve --api-server-count 2`: what each front end has let in counts for the other.

The engine has no model, and gives tokens at a fixed rate. While it stands still it tells nothing, so all that a front
end can know of the other's requests stands on the board.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from benchmarks import workloads
from tests.server.process import ServerProcess, server_process, wait_until
from tests.server.test_hangs import CORE, FRONT_END, processes

RATE, SEATS, TOKENS = 4000, 8, 10  # tokens a second in all: 400 answers
MOST = 1  # second that a request may wait
BODY = {"max_tokens": TOKENS, "ignore_eos": True, "prompt": [300, 301]}
MANY = {**BODY, "prompt": [[300, 301]] * 1000}  # 2.5 s of work


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It knows how fast its queue moves, and has two front ends."""
    model = workloads.write_model_dir("tiny-qwen3", tmp_path_factory.mktemp("models") / "m", tokenizer=True)
    options = ["--device", "cpu", "--port", "0", "--api-server-count", "2", "--max-num-seqs", str(SEATS)]
    options += ["--max-queue-seconds", str(MOST), "--hang-timeout", "600", "--max-model-len", "1024"]
    command = ["serve", str(RATE), "", str(model), *options]
    with server_process("benchmarks.front_end", *command) as process, httpx.Client(timeout=120) as client:
        url = f"{process.url}/v1/completions"
        assert client.post(url, json={**BODY, "prompt": [[300, 301]] * 64}).status_code == 200
        assert wait_until(lambda: wait_told(process) == 0)
        yield process


def wait_told(server: ServerProcess) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return max(float(line.split()[-1]) for line in lines if line.startswith("quire:queue_wait_seconds{"))


def front_end_of(client: httpx.Client, server: ServerProcess) -> int:
    """The process at the other end of the client's one connection."""
    client.get(f"{server.url}/livez")
    [stream] = [s for s in (client._transport._pool.connections) if not s.is_closed()]  # type: ignore[attr-defined]
    port = stream._connection._network_stream.get_extra_info("client_addr")[1]
    for process in processes(server, FRONT_END):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(c.raddr and c.raddr.port == port for c in process.net_connections("tcp")):
                return process.pid
    return 0


@contextlib.contextmanager
def two_clients(server: ServerProcess) -> Iterator[dict[int, httpx.Client]]:
    """One of each front end, by its process: a new connection goes to the one that has fewer."""
    found: dict[int, httpx.Client] = {}
    with contextlib.ExitStack() as stack:

        def is_complete() -> bool:
            client = stack.enter_context(httpx.Client(timeout=120))
            if pid := front_end_of(client, server):
                found.setdefault(pid, client)
            return len(found) == 2

        assert wait_until(is_complete)
        yield found


@contextlib.contextmanager
def still_core(server: ServerProcess) -> Iterator[None]:
    [core] = processes(server, CORE)
    core.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        core.send_signal(signal.SIGCONT)


def test_what_one_front_end_has_let_in_makes_the_other_refuse(server: ServerProcess) -> None:
    url = f"{server.url}/v1/completions"
    with two_clients(server) as clients, ThreadPoolExecutor() as threads:
        one, other = clients.values()
        with still_core(server):
            let_in = threads.submit(one.post, url, json=MANY)
            assert wait_until(lambda: wait_told(server) > MOST)
            refused = other.post(url, json=BODY)
            assert refused.status_code == 503, refused.text
            assert MOST < int(refused.headers["retry-after"]) <= 1000
        assert let_in.result().status_code == 200  # what was let in is answered
        assert wait_until(lambda: wait_told(server) == 0)
        assert other.post(url, json=BODY).status_code == 200


def test_what_a_dead_front_end_had_let_in_keeps_nobody_out(server: ServerProcess) -> None:
    url = f"{server.url}/v1/completions"
    with two_clients(server) as clients, ThreadPoolExecutor() as threads:
        (pid, one), (_, other) = clients.items()
        with still_core(server):
            lost = threads.submit(one.post, url, json=MANY)
            assert wait_until(lambda: wait_told(server) > MOST)
            assert other.post(url, json=BODY).status_code == 503
            psutil.Process(pid).kill()
            with pytest.raises(httpx.HTTPError):
                lost.result()
            assert wait_until(lambda: wait_told(server) == 0)
            taken = threads.submit(other.post, url, json=BODY)
        assert taken.result().status_code == 200
