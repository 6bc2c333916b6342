"""What the router costs a request, and what it is worth before several servers.

    python -m benchmarks.scale.router [--tests overhead goodput kill] [--replicas 4] [--requests 240] [--write]

overhead: the same small request to a server that answers at once, straight and through the router, in turns, over one
connection; what the router adds to the median and to the 99th percentile, and the processor time of a request.
goodput: a trace of questions on few long documents, whose KV one replica cannot hold all of, by `--in-flight` clients
that ask again when answered; requests answered within `--limit` seconds a second, by policy, each before fresh caches.
kill: the same trace, and one replica killed amid it; requests that failed before the first byte.
All on CPU with the demo model, one thread a replica; or --shape: random weights, a GPU a replica.

    python -m benchmarks.scale.router --tests goodput kill --shape llama-3.1-8b --document 8000 --documents 64 --kept 20
                                      --in-flight 64 --requests 1000 --answer 32 --limit 2 --write
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks import results_file, workloads
from benchmarks.results_file import Row
from benchmarks.serve import device_name

MODEL = "quire-demo"
POLICIES = ("prefix", "least_load", "round_robin")
ANSWER = b'{"id":"x","object":"text_completion","choices":[{"index":0,"text":"ok"}]}'
INSTANT = f"""
import asyncio, re
REPLY = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n" % len({ANSWER!r}) + {ANSWER!r}
class Server(asyncio.Protocol):
    def connection_made(self, transport): self.transport, self.data = transport, b""
    def data_received(self, data):
        self.data += data
        while b"\\r\\n\\r\\n" in self.data:
            head, _, rest = self.data.partition(b"\\r\\n\\r\\n")
            found = re.search(rb"content-length: *([0-9]+)", head.lower())
            size = int(found[1]) if found else 0
            if len(rest) < size: return
            self.data = rest[size:]
            self.transport.write(REPLY)
async def main():
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(f"Ready: http://127.0.0.1:{{server.sockets[0].getsockname()[1]}}", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""  # noqa: E501


@contextlib.contextmanager
def process(*command: str, gpu: int | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its URL, once it says that it is ready."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    running = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert running.stdout is not None
        for line in running.stdout:
            if found := re.match(r"Ready: (\S+)", line):
                yield found[1], running
                break
        else:
            raise SystemExit(f"{command} has ended")
    finally:
        running.kill()
        running.wait()


def ready(url: str, count: int) -> None:
    """Wait until so many servers are behind the router."""
    while True:
        with urllib.request.urlopen(f"{url}/router/backends") as answer:
            if sum(each["ready"] for each in json.load(answer)["backends"]) == count:
                return
        time.sleep(0.05)


# -- overhead ----------------------------------------------------------------------------------------------------


def times(url: str, body: bytes, count: int, other: str) -> tuple[list[float], list[float]]:
    """Seconds of the same request to `url` and to `other`, in turns."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    found: tuple[list[float], list[float]] = [], []
    sockets = []
    for one in (url, other):
        host, port = one.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.append(connection)
    for _ in range(count):
        for place, connection in enumerate(sockets):
            began = time.perf_counter()
            connection.sendall(head + body)
            answer = b""
            while not answer.endswith(ANSWER):
                answer += connection.recv(65536)
            found[place].append(time.perf_counter() - began)
    return found


def overhead(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with process("-c", INSTANT) as (direct, _), process(*route(arguments, "prefix", [direct])) as (routed, router):
        ready(routed, 1)
        for size in (200, 4000, 64000):
            body = json.dumps({"model": MODEL, "prompt": "x" * size, "max_tokens": 8}).encode()
            times(direct, body, 200, routed)
            before = psutil.Process(router.pid).cpu_times()
            straight, through = times(direct, body, arguments.calls, routed)
            after = psutil.Process(router.pid).cpu_times()
            cpu = (after.user + after.system - before.user - before.system) / arguments.calls
            added = [b - a for a, b in zip(straight, through, strict=True)]
            for metric, value in (
                ("added median", statistics.median(through) - statistics.median(straight)),
                ("added p99", quantile(through, 0.99) - quantile(straight, 0.99)),
                ("p99 of what a pair differs by", quantile(added, 0.99)),
                ("processor time", cpu),
            ):
                rows.append(Row("router", "none", f"prompt of {size} bytes", metric, 1000 * value, "ms"))
    return rows


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# -- goodput -----------------------------------------------------------------------------------------------------


def route(arguments: argparse.Namespace, policy: str, urls: list[str]) -> list[str]:
    options = ["--port", "0", "--policy", policy, "--health-interval", str(arguments.health_interval)]
    return ["-m", "quire.cli.main", "route", *options, "--backend", *urls]


@contextlib.contextmanager
def servers(arguments: argparse.Namespace) -> Iterator[list[tuple[str, subprocess.Popen[str]]]]:
    """Their URLs and processes; they start together."""
    options = ["-m", "quire.cli.main", "serve", "--port", "0", "--server-dev-mode", "--max-num-seqs", "16"]
    blocks = arguments.kept * (arguments.document // 16 + 4) + 16 * 4
    options += ["--num-gpu-blocks-override", str(blocks)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        if arguments.shape:
            model = workloads.write_model_dir(arguments.shape, Path(folder) / arguments.shape, tokenizer=True)
            options += ["--model", str(model), "--load-format", "dummy", "--served-model-name", MODEL]
        else:
            options += ["--device", "cpu", "--num-threads", "1"]
        with contextlib.ExitStack() as stack:
            every = [process(*options, gpu=number if arguments.shape else None) for number in range(arguments.replicas)]
            yield [*pool.map(stack.enter_context, every)]


def model_of(arguments: argparse.Namespace) -> str:
    return arguments.shape or MODEL


def trace(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Questions on documents, in any order."""
    dice = random.Random(arguments.seed)
    documents = [[dice.randrange(3, 4000) for _ in range(arguments.document)] for _ in range(arguments.documents)]
    asked = [
        {
            "model": MODEL,
            "prompt": [*documents[number % len(documents)], *(dice.randrange(3, 4000) for _ in range(16))],
            "max_tokens": arguments.answer,
            "ignore_eos": True,
            "temperature": 0,
        }
        for number in range(arguments.requests)
    ]
    dice.shuffle(asked)
    return asked


async def ask_all(
    url: str, asked: list[dict[str, Any]], arguments: argparse.Namespace, victim: subprocess.Popen[str] | None = None
) -> tuple[list[float], int, float]:
    """Seconds of each answer, failures, and seconds in all. victim: is killed after a third of them."""
    left, took, failed = list(asked), list[float](), 0

    async def client(http: aiohttp.ClientSession) -> None:
        nonlocal failed
        while left:
            body, began = left.pop(), time.perf_counter()
            if victim is not None and len(left) == 2 * len(asked) // 3:
                victim.kill()
            try:
                async with http.post(f"{url}/v1/completions", json=body) as answer:
                    await answer.read()
                    failed += answer.status != 200
            except aiohttp.ClientError:
                failed += 1
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as http:
        await asyncio.gather(*(client(http) for _ in range(arguments.in_flight)))
    return took, failed, time.perf_counter() - began


def fresh(urls: list[str]) -> None:
    for url in urls:
        urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")).read()


def goodput(arguments: argparse.Namespace) -> list[Row]:
    rows, asked = [], trace(arguments)
    case = f"{arguments.documents} documents of {arguments.document} tokens, {arguments.replicas} replicas"
    with servers(arguments) as running:
        urls = [url for url, _ in running]
        for repeat in range(arguments.repeats):
            for policy in POLICIES if repeat % 2 == 0 else POLICIES[::-1]:
                fresh(urls)
                with process(*route(arguments, policy, urls)) as (url, _):
                    ready(url, len(urls))
                    took, failed, seconds = asyncio.run(ask_all(url, asked, arguments))
                in_time = sum(one <= arguments.limit for one in took) - failed
                name = f"{case}, {policy}"
                rows += [
                    Row("router", model_of(arguments), name, "goodput", in_time / seconds, "requests/s"),
                    Row("router", model_of(arguments), name, "answer median", 1000 * statistics.median(took), "ms"),
                    Row("router", model_of(arguments), name, "failed", failed, "requests"),
                ]
                show(rows[-3:])
    return rows


def kill(arguments: argparse.Namespace) -> list[Row]:
    asked = trace(arguments)
    with servers(arguments) as running, process(*route(arguments, "prefix", [url for url, _ in running])) as (url, _):
        ready(url, len(running))
        _, failed, _ = asyncio.run(ask_all(url, asked, arguments, running[0][1]))
    case = f"one of {arguments.replicas} killed, {arguments.requests} requests, {arguments.in_flight} at once"
    return [Row("router", model_of(arguments), case, "failed", failed, "requests")]


def show(rows: list[Row]) -> None:
    for row in rows:
        print(f"{row.case:60s} {row.metric:32s} {row.value:10.3f} {row.unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tests = {"overhead": overhead, "goodput": goodput, "kill": kill}
    parser.add_argument("--tests", nargs="+", choices=tests, default=list(tests))
    for name, value in {
        "replicas": 4, "requests": 240, "documents": 24, "document": 1200, "kept": 8, "answer": 4, "in_flight": 12,
        "calls": 3000, "repeats": 1, "seed": 1,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds in which an answer must come to count")
    parser.add_argument("--health-interval", type=float, default=1.0)
    parser.add_argument("--shape", choices=list(workloads.MODELS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in arguments.tests:
        found = tests[name](arguments)
        if name != "goodput":
            show(found)
        rows += found
    if arguments.write:
        command = f"python -m benchmarks.scale.router {' '.join(sys.argv[1:])}"
        settings = {name: value for name, value in vars(arguments).items() if name not in ("write", "out")}
        device = device_name() if arguments.shape else f"cpu {os.cpu_count()} threads"
        print(results_file.write(rows, device, command, settings, arguments.out, "router"))


if __name__ == "__main__":
    main()
