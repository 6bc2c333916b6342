"""What the HTTP server needs for itself: streamed tokens a second and core, before an engine that costs nothing.

    python -m benchmarks.front_end [--streams 256 1024] [--rate 8000] [--tokens 100] [--parsers] [--baseline] [--write]
    python -m benchmarks.front_end --processes 1 2 [--rate 100000] [--write]

The engine gives every running request a token at a fixed rate (`--rate` tokens a second in all, so that no two share a
chunk); requests are checked, answers detokenised, framed and sent as ever. Figures are tokens over the CPU seconds of
the server's process. --processes: as many front ends, before a real core in a process of its own whose model costs
nothing (null_worker.py); "tok/s" is what all clients got, the gap is that between two chunks of a stream.
--baseline: the same of a server that makes a Pydantic object a token (front_end_baseline.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from benchmarks import null_worker, results_file, serve_load, workloads
from benchmarks.results_file import Row
from benchmarks.serve import Server
from quire.engine.client import EngineInfo
from quire.types.output import EngineOutput, EngineOutputs, EngineStats
from quire.types.request import EngineRequest

if TYPE_CHECKING:
    from quire.config.resolve import Resolved
    from quire.frontend.async_engine import AsyncLLM

MODEL = "tiny-qwen3"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class NullClient:
    """An engine client whose requests get their tokens at `rate` a second in all, from no engine."""

    owns_engine = True

    def __init__(self, info: EngineInfo, rate: float) -> None:
        self.info = info
        self.last_heard = time.monotonic()
        self._rate = rate
        self._new: list[EngineRequest] = []
        self._left: dict[str, int] = {}  # tokens to come, by id
        self._work = asyncio.Event()

    def add(self, request: EngineRequest) -> None:
        self._new.append(request)
        self._work.set()

    def abort(self, request_ids: Sequence[str], reason: str = "abort") -> None:  # noqa: ARG002
        for request_id in request_ids:
            self._left.pop(request_id, None)

    async def outputs(self) -> AsyncGenerator[EngineOutputs, None]:
        due, token = time.monotonic(), 256
        while True:
            if not self._left and not self._new:
                self._work.clear()
                await self._work.wait()
                due = time.monotonic()
            token = 256 + (token + 1) % 50_000
            yield self._step(token)
            due += len(self._left) / self._rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def _step(self, token: int) -> EngineOutputs:
        special = [EngineOutput(request_id=r.id, token_ids=[token]) for r in self._new if r.max_tokens > 1]
        special += [
            EngineOutput(request_id=r.id, token_ids=[token], finish_reason="length")
            for r in self._new
            if r.max_tokens == 1
        ]
        ids: list[str] = []
        for request_id, left in self._left.items():
            if left > 1:
                ids.append(request_id)
            else:
                special.append(EngineOutput(request_id=request_id, token_ids=[token], finish_reason="length"))
        self._left = {i: self._left[i] - 1 for i in ids} | {
            r.id: r.max_tokens - 1 for r in self._new if r.max_tokens > 1
        }
        self._new = []
        return EngineOutputs(ids=ids, tokens=[token] * len(ids), special=special, stats=EngineStats())

    async def call_async(self, method: str, *_: Any) -> Any:
        raise NotImplementedError(method)

    def shutdown(self) -> None:
        pass


def null_engine(resolved: Resolved, rate: float) -> AsyncLLM:
    """All of the front end, with nothing behind it."""
    from quire.frontend.async_engine import AsyncLLM
    from quire.frontend.tokenization.tokenizer import load_tokenizer
    from quire.types.kv import WorkerReport

    report = WorkerReport(
        device="none", num_blocks=1, max_model_len=resolved.max_model_len, groups=[],
        vocab_size=resolved.info.vocab_size, weight_bytes=0, kv_bytes=0, free_bytes=0, attention_backend="none",
        phases={"load": 0.0},
    )  # fmt: skip
    client: Any = NullClient(EngineInfo(resolved, report), rate)
    return AsyncLLM(client, load_tokenizer(resolved))


def serve(arguments: list[str]) -> int:
    """`quire serve` around a NullClient; the first argument is its rate, the second a file for a profile or ""."""
    import cProfile
    import signal

    from quire.cli.main import main
    from quire.config.engine import EngineConfig
    from quire.config.resolve import resolve
    from quire.frontend.async_engine import AsyncLLM

    rate, profile, *rest = arguments
    if "--api-server-count" in rest:
        _serve_null_worker(rate)
        return main(["serve", *rest])
    profiler = cProfile.Profile()

    async def start(config: EngineConfig, serving: bool = False) -> AsyncLLM:
        if profile:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, profiler.enable)
            loop.add_signal_handler(signal.SIGUSR2, lambda: (profiler.disable(), profiler.dump_stats(profile)))
        return null_engine(resolve(config, serving=serving), float(rate))

    AsyncLLM.start = start  # type: ignore[method-assign,assignment]
    return main(["serve", *rest])


def _serve_null_worker(rate: str) -> None:
    """Let engines that are started from now on have no model."""
    from functools import partial

    from quire.engine.client import ProcessClient
    from quire.frontend import async_engine
    from quire.server.processes import supervisor

    os.environ["QUIRE_NULL_RATE"] = rate
    client: Any = partial(ProcessClient, worker=null_worker.NAME)
    async_engine.ProcessClient = supervisor.ProcessClient = client  # type: ignore[misc]


def body(endpoint: str, tokens: int, number: int, tools: list[dict[str, Any]] | None) -> bytes:
    shared = {"max_tokens": tokens, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    ask: dict[str, Any] = {"prompt": [300 + number % 1000] * 100}
    if "chat" in endpoint:
        ask = {"messages": [{"role": "user", "content": f"question {number}"}]} | ({"tools": tools} if tools else {})
    elif "responses" in endpoint:
        ask = {"input": f"question {number}", "stream": True, "ignore_eos": True, "max_output_tokens": tokens}
        return json.dumps(ask).encode()
    elif "messages" in endpoint:
        messages = [{"role": "user", "content": f"question {number}"}]
        return json.dumps({"model": MODEL, "messages": messages, "stream": True, "max_tokens": tokens}).encode()
    return json.dumps(ask | shared).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--rate", type=float, default=8000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--endpoints", nargs="+", default=ENDPOINTS, choices=ENDPOINTS)
    parser.add_argument("--parsers", action="store_true", help="chat answers may hold reasoning and tool calls")
    parser.add_argument("--processes", nargs="+", type=int, help="front ends before a core in a process of its own")
    parser.add_argument("--write", action="store_true", help="write the figures to a file of results")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER, help="its folder")
    parser.add_argument(
        "--device", default=f"cpu ({os.cpu_count()} threads)", help="what it says they were measured on"
    )
    parser.add_argument("--baseline", action="store_true", help="measure the usual way to write a server as well")
    parser.add_argument("--profile", default="", help="file for a profile of the last case, taken from its second half")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as log:
        model = workloads.write_model_dir(MODEL, Path(folder) / MODEL, tokenizer=True)
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        command = [sys.executable, "-m", "benchmarks.front_end", "serve", str(args.rate), args.profile]
        options = ["--served-model-name", MODEL]
        options += ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"] if args.parsers else []
        if args.processes:
            measure_processes(model, options, log, command, args)
            return
        print(f"{'endpoint':32}{'streams':>8}{'tokens':>9}{'chunks':>9}{'s':>7}{'CPU s':>7}{'tok/s a core':>14}")
        rows = []
        with Server(model, options, log, 60, command) as server:
            for endpoint in args.endpoints:
                rows += [measure(server, endpoint, endpoint, streams, args) for streams in args.streams]
        if args.baseline:
            args.profile = ""
            command = [sys.executable, "-m", "benchmarks.front_end_baseline", "--rate", str(args.rate)]
            with Server(model, [], log, 60, command) as server:
                for endpoint in (one for one in args.endpoints if "completions" in one):
                    name = f"baseline {endpoint}"
                    rows += [measure(server, name, endpoint, streams, args) for streams in args.streams]
        write(rows, "front-end", args)


class Figures(NamedTuple):
    tokens: int
    chunks: int
    seconds: float  # from the first request to the last token
    busy: float  # CPU seconds of the processes that answer HTTP
    gap_p50: float  # seconds between two chunks of a stream
    gap_p99: float


def measure(server: Server, name: str, endpoint: str, streams: int, args: argparse.Namespace) -> Row:
    import signal

    if args.profile:
        server.signal(signal.SIGUSR1)
    seen = load(server, endpoint, streams, args)
    if args.profile:
        server.signal(signal.SIGUSR2)
    figure = seen.tokens / seen.busy
    counts = f"{streams:8}{seen.tokens:9}{seen.chunks:9}{seen.seconds:7.2f}{seen.busy:7.2f}"
    print(f"{name:32}{counts}{figure:14,.0f}", flush=True)
    return Row("front end", MODEL, f"{name} {streams} streams", "tok/s a core", round(figure, 1), "core")


def write(rows: list[Row], part: str, args: argparse.Namespace) -> None:
    if args.write:
        settings = {"rate": args.rate, "tokens": args.tokens, "load generator": "2 processes on the same machine"}
        command = " ".join(["python -m benchmarks.front_end", *sys.argv[1:]])
        print(results_file.write(rows, args.device, command, settings, args.out, part))


def load(server: Server, endpoint: str, streams: int, args: argparse.Namespace) -> Figures:
    """All streams at once, from two processes."""
    before = cpu_seconds(server)
    tools = TOOLS if args.parsers else None
    planned = [serve_load.Planned(0.0, body(endpoint, args.tokens, i, tools), args.tokens) for i in range(streams)]
    start, seen = serve_load.run(server.url + endpoint, planned, 2)
    busy = cpu_seconds(server) - before
    errors = {s.error for s in seen if s.error}
    if errors:
        raise SystemExit(f"requests failed: {errors}")
    gaps = [b - a for s in seen for a, b in zip(s.events, s.events[1:], strict=False)]
    return Figures(
        tokens=sum(s.num_tokens for s in seen),
        chunks=sum(len(s.events) for s in seen),
        seconds=max(s.events[-1] for s in seen) - start,
        busy=busy,
        gap_p50=serve_load.percentile(gaps, 50),
        gap_p99=serve_load.percentile(gaps, 99),
    )


def cpu_seconds(server: Server) -> float:
    """Of all processes that answer HTTP."""
    lines = urllib.request.urlopen(server.url + "/metrics", timeout=10).read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("process_cpu_seconds_total"))


def measure_processes(
    model: Path, options: list[str], log: IO[str], command: list[str], args: argparse.Namespace
) -> None:
    columns = ("tok/s", "chunks/s", "CPU s", "tok/s a core", "gap p50 ms", "p99 ms")
    print(f"{'endpoint':24}{'streams':>8}{'front ends':>12}" + "".join(f"{name:>14}" for name in columns))
    rows = []
    for count in args.processes:
        shared = ["--api-server-count", str(count), "--max-num-seqs", "1024", "--device", "cpu"]
        with Server(model, [*options, *shared], log, 120, command) as server:
            for endpoint in args.endpoints:
                for streams in args.streams:
                    f = load(server, endpoint, streams, args)
                    values = (
                        f.tokens / f.seconds, f.chunks / f.seconds, f.busy, f.tokens / f.busy, f.gap_p50 * 1e3,
                        f.gap_p99 * 1e3,
                    )  # fmt: skip
                    numbers = "".join(f"{value:14,.1f}" if value < 1000 else f"{value:14,.0f}" for value in values)
                    print(f"{endpoint:24}{streams:8}{count:12}{numbers}", flush=True)
                    case = f"{endpoint} {streams} streams, {count} front ends"
                    rows += [
                        Row("front ends", MODEL, case, name, round(value, 2), name.split()[-1])
                        for name, value in zip(columns, values, strict=True)
                    ]
    write(rows, "front-ends", args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve(sys.argv[2:]))
    main()
