"""Processes of a server that are stopped (SIGSTOP) and go on (SIGCONT): who notices, how soon, and what is said."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.server.process import PATIENCE, ServerProcess, server_process, status_of, wait_until

CORE, WORKER, FRONT_END = "quire.engine.process", "quire.executor.worker_process", "quire.server.processes.front_end"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two front ends, a core and a worker in a process of its own."""
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "600"]
    options += ["--api-server-count", "2", "--distributed-executor-backend", "mp", "--hang-timeout", "3"]
    options += ["--ping-interval", "0.2", "--batch-dir", str(tmp_path_factory.mktemp("batches"))]
    with server_process("quire.cli.main", "serve", *options) as process:
        assert process.url
        yield process


def processes(server: ServerProcess, module: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if module in child.cmdline():
                found.append(child)
    return found


def count(server: ServerProcess, words: str) -> int:
    return sum(words in line for line in server.err)


def probes(server: ServerProcess) -> dict[str, int]:
    return {path: status_of(server.url + path) for path in ("/health", "/ping", "/readyz", "/livez")}


WELL = {"/health": 200, "/ping": 200, "/readyz": 200, "/livez": 200}
HUNG = {"/health": 503, "/ping": 503, "/readyz": 503, "/livez": 200}


@pytest.mark.parametrize(("module", "busy"), [(CORE, False), (WORKER, False), (CORE, True)])
def test_an_engine_that_hangs_is_unhealthy_until_it_goes_on(server: ServerProcess, module: str, busy: bool) -> None:
    assert wait_until(lambda: probes(server) == WELL, PATIENCE)
    begun, over = count(server, "the engine hangs"), count(server, "the engine goes on")
    [process] = processes(server, module)
    body = {"prompt": "a", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        if busy:
            stream = stack.enter_context(httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60))
            lines = stream.iter_lines()
            next(lines)
        process.suspend()
        stack.callback(process.resume)
        # Whichever front end is asked.
        assert wait_until(lambda: probes(server) == probes(server) == HUNG, PATIENCE), server.err
        process.resume()
        assert wait_until(lambda: probes(server) == probes(server) == WELL, PATIENCE), server.err
        if busy:
            # The engine is as quick as before: it does not take the time for which it was stopped for that of a step.
            assert sum(line.startswith("data: {") for line in itertools.islice(lines, 200)) == 100
    assert wait_until(lambda: count(server, "the engine goes on") == over + 1, PATIENCE), server.err
    assert count(server, "the engine hangs") == begun + 1, server.err  # one of the two front ends says so


def test_a_front_end_that_hangs_is_replaced_and_nobody_meets_one_that_is_not_ready(server: ServerProcess) -> None:
    assert wait_until(lambda: probes(server) == WELL, PATIENCE)
    before = processes(server, FRONT_END)
    statuses: set[int | str] = set()
    is_over = threading.Event()

    def knock() -> None:
        while not is_over.is_set():
            try:
                statuses.add(httpx.get(f"{server.url}/readyz", timeout=30).status_code)
            except httpx.HTTPError as error:
                statuses.add(repr(error))

    assert len(before) == 2
    restarts = count(server, "it is started again")
    before[0].suspend()
    assert wait_until(lambda: count(server, "hangs: no sign of life for") == 1, PATIENCE), server.err
    knocking = threading.Thread(target=knock)
    knocking.start()  # over fresh connections, while another one starts
    with contextlib.ExitStack() as stack:
        stack.callback(knocking.join)
        stack.callback(is_over.set)
        assert wait_until(lambda: count(server, "it is started again") == restarts + 1, PATIENCE)
        assert wait_until(lambda: len(both(server)) == 2), server.err
    assert statuses == {200}, statuses
    assert before[1] in processes(server, FRONT_END)
    assert before[0] not in processes(server, FRONT_END)


def both(server: ServerProcess) -> set[int]:
    """The processes that take connections."""
    return {one.pid for one in processes(server, FRONT_END) if takes_connections(server, one)}


def takes_connections(server: ServerProcess, process: psutil.Process) -> bool:
    """Whether it has one of several connections that are open at once."""
    port = int(server.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=PATIENCE))
            client.get("/livez")
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(c.laddr.port == port and c.status == "ESTABLISHED" for c in process.net_connections("tcp"))
    return False


def test_the_end_is_told(server: ServerProcess) -> None:
    """Last: it ends the server."""
    body = {"prompt": "a", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        assert wait_until(lambda: count(server, "drain begins: 1 requests run") == 1), server.err
        server.signal(signal.SIGINT)
        assert server.exit_code() == 0
    for words in ("SIGTERM came", "SIGINT came", "told to stop at once, 1 requests are aborted"):
        assert wait_until(lambda words=words: count(server, words) == 1), "".join([words, *server.err[-8:]])  # type: ignore[misc]
    assert count(server, "drain begins") == count(server, "drain ends") == 2  # in both front ends
    assert "Traceback" not in "".join(server.err)
