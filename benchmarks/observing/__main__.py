"""What being looked at costs: a dashboard beside streams, traces, the access log, and the pieces by themselves.

    python -m benchmarks.observing [--rounds 5] [--write]

Costs are processor time, which other work on the machine does not change much: of the whole server (front end, core
and worker) for a token, with and without somebody who looks; and of each piece, by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import numpy as np
import psutil

from benchmarks.results_file import Row, table, write
from quire.engine.steps import Steps
from quire.kv.cells import block_cells
from quire.kv.manager import KVManager
from quire.server.dashboard.history import History
from quire.server.http.trail import Trail
from quire.types.kv import KVGroupSpec
from quire.types.output import EngineStats, RequestMetrics
from quire.types.view import CHUNK, LifeEvent, StepView
from tests.observe.otlp_receiver import otlp_receiver
from tests.server.conftest import echo_server
from tests.server.process import server_process

STREAMS, TOKENS = 16, 160
MODEL = "quire-demo"
SERVE = ["serve", "--port", "0", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "1000"]


def microseconds(work: Callable[[], Any], times: int = 200) -> float:
    """Processor time of one, the median of five rounds."""
    found = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - began) / times * 1e6)
    return statistics.median(found)


def pieces() -> Iterator[Row]:
    def row(case: str, value: float) -> Row:
        return Row("observing", "-", case, "processor time", round(value, 2), "us")

    steps, step = Steps(), StepView(1, 1.0, 0.01, 0.0, 0.01, 100, 64, 0, 3, 64)

    def add() -> None:
        steps.add(step)
        if steps.num_steps % 20 == 0:
            steps.tell(EngineStats())

    yield row("ring of steps, a step", microseconds(add, 5000))
    yield row("map of 64 Ki blocks of 1,000 requests, a look", microseconds(*_block_map()))
    with echo_server() as served:
        assert served.service.metrics is not None
        history = History(served.service.metrics)
        stats = EngineStats()
        history.note(stats)

        def sample() -> None:
            history._row(stats, history._seen[-1], history._seen[0], history._look(stats, time.monotonic() + 1))

        yield row("row of the history, a second", microseconds(sample))
    yield row("trail, a request", microseconds(lambda: Trail("POST", "/v1/chat/completions").line(), 5000))
    yield row("trace of ten spans, a request", _trace())


def _block_map() -> tuple[Callable[[], Any], int]:
    class Owner:
        def __init__(self, number: int) -> None:
            from array import array

            self.id, self.tokens, self.hashes, self.extra_key = str(number), array("i"), [], b""

    kv = KVManager(1 << 16, [KVGroupSpec("full", 16, 1, 1, 8, 2)])
    owners = [Owner(i) for i in range(1000)]
    for owner in owners:
        kv.admit(owner, [[]], 0)
        kv.allocate(owner, 16 * 64)
    return (lambda: block_cells(kv, owners)), 20


def _trace() -> float:
    from quire.server.tracing import Tracing

    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    with otlp_receiver() as receiver:
        tracing = Tracing(receiver.url, MODEL)
        times = RequestMetrics(1.0, 1.1, 1.2, 2.0, life=[LifeEvent(1.1 + i / 100, CHUNK, i, i + 1) for i in range(5)])
        times.detokenizing.add(0.001)

        def one() -> None:
            trail = Trail("POST", "/v1/chat/completions", began=1.0, seconds=1.0, encoding=(1.0, 1.01), times=[times])
            tracing.begin([], 1.0).end(trail)

        found = microseconds(one, 200)
        tracing.close()
    return found


class Server:
    """One of the sides, with the processor time of all its processes."""

    def __init__(self, process: Any) -> None:
        self.url: str = process.url
        self._processes = [psutil.Process(process.process.pid)]
        self._processes += self._processes[0].children(recursive=True)

    def seconds(self) -> float:
        return float(sum(sum(process.cpu_times()[:2]) for process in self._processes))


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> None:
    body = {"messages": [{"role": "user", "content": f"Tell me a story about {number} foxes."}], "stream": True}
    body |= {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, "seed": number}
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for _ in reply.content:
            pass


async def watch(session: aiohttp.ClientSession, url: str) -> None:
    """As the page does it."""
    since, step = 0.0, -1
    while True:
        async with session.get(f"{url}/dashboard/state?since={since}&step={step}") as reply:
            told = await reply.json()
        if told["history"]["rows"]:
            since = told["history"]["rows"][-1][0]
        if told.get("steps"):
            step = told["steps"][-1][0]
        await asyncio.sleep(1.0)


async def once(server: Server, *, is_watched: bool) -> float:
    """Processor seconds of the server for 1,000 tokens."""
    async with aiohttp.ClientSession() as session:
        watcher = asyncio.create_task(watch(session, server.url)) if is_watched else None
        before = server.seconds()
        await asyncio.gather(*(stream(session, server.url, number) for number in range(STREAMS)))
        spent = server.seconds() - before
        if watcher is not None:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
    return spent / (STREAMS * TOKENS) * 1000


def sides(rounds: int) -> Iterator[Row]:
    """Interleaved, so that what else the machine does strikes all alike."""
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with otlp_receiver() as receiver, contextlib.ExitStack() as stack:
        traced = [*SERVE, "--otlp-traces-endpoint", receiver.url, "--enable-access-log", "--enable-mfu-metrics"]
        plain = Server(stack.enter_context(server_process("quire.cli.main", *SERVE)))
        full = Server(stack.enter_context(server_process("quire.cli.main", *traced, **environment)))
        cases = {
            "nobody looks": (plain, False),
            "a dashboard is open": (plain, True),
            "traces, access log, work metrics": (full, False),
        }
        found: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(rounds + 1):
            for name, (server, is_watched) in cases.items():
                spent = asyncio.run(once(server, is_watched=is_watched))
                if number:  # the first warms up
                    found[name].append(spent)
    base = np.median(found["nobody looks"])
    for name, values in found.items():
        middle = float(np.median(values))
        yield Row("observing", MODEL, name, "processor time of 1,000 tokens", round(middle, 4), "s")
        spread = (max(values) - min(values)) / middle
        yield Row("observing", MODEL, name, "against nobody", round((middle / base - 1) * 100, 2), "%")
        yield Row("observing", MODEL, name, "spread of the rounds", round(spread * 100, 2), "%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    given = parser.parse_args()
    rows = [*pieces(), *sides(given.rounds)]
    print(table(rows))
    if given.write:
        settings = {"streams": STREAMS, "tokens": TOKENS, "rounds": given.rounds, "threads": 1}
        path = write(rows, "CPU", "python -m benchmarks.observing", settings, part="observing")
        print(path)


if __name__ == "__main__":
    main()
