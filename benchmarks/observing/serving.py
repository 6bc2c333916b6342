"""What being looked at costs a GPU's server: throughput and gaps beside an open dashboard, and with traces, the access
log and metrics of work switched on.

    python -m benchmarks.observing.serving [--model llama-3.1-8b] [--rate 64] [--seconds 10] [--at-once 500]

Requests are T5's (`benchmarks.serve`), the same each time: a first round, which is not counted, leaves their prompts in
the prefix cache. Nobody and somebody look in turn at one server; what has to be switched on at the start is a server of
its own, after it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from benchmarks import results_file, workloads
from benchmarks.observing.__main__ import watch
from benchmarks.results_file import Row
from benchmarks.serve import Server, device_name, measure
from tests.observe.otlp_receiver import otlp_receiver

SHOWN = {"output_tok_s": "tok/s", "ttft_p50_ms": "ms", "gap_p50_ms": "ms", "mean_p50_ms": "ms", "mean_p99_ms": "ms"}
PROCESSES = 4  # of the load generator


@contextlib.contextmanager
def dashboard(url: str) -> Iterator[None]:
    """Somebody looks, from a thread of its own."""
    loop = asyncio.new_event_loop()

    async def look() -> None:
        async with aiohttp.ClientSession() as session:
            await watch(session, url)

    task = loop.create_task(look())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    assert not task.done(), task
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(workloads.MODELS))
    parser.add_argument("--rate", type=float, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=500)
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}

    def note(server: Server, who: str, *, counts: bool = True) -> None:
        for rate in (args.rate, float("inf")):
            print(f"{who}, {rate:g} requests/s", flush=True)
            figures = measure(server, args.model, workloads.t5(rate, args.seconds, args.at_once), PROCESSES)
            print("  " + "  ".join(f"{name} {value:,.2f}" for name, value in figures.items()), flush=True)
            if counts:
                found.setdefault((who, f"rate={rate:g}"), []).append(figures)

    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    with (
        tempfile.TemporaryDirectory() as folder,
        (args.out / "serving.log").open("w") as log,
        otlp_receiver() as receiver,
    ):
        model = workloads.write_model_dir(args.model, Path(folder) / args.model, tokenizer=True)
        plain = ["--load-format", "dummy", "--served-model-name", args.model]
        full = [*plain, "--otlp-traces-endpoint", receiver.url, "--enable-access-log", "--enable-mfu-metrics"]
        with Server(model, plain, log, 120) as server:
            note(server, "first round", counts=False)
            for _ in range(args.rounds):
                note(server, "nobody looks")
                with dashboard(server.url):
                    note(server, "a dashboard is open")
        with Server(model, full, log, 120) as server:
            note(server, "first round", counts=False)
            for _ in range(args.rounds):
                note(server, "traces, access log, work metrics")
        spans = len(receiver.spans)
    rows = [
        Row("observing", args.model, f"{case},{who}", name, round(statistics.median(f[name] for f in figures), 3), unit)
        for (who, case), figures in found.items()
        for name, unit in SHOWN.items()
    ]
    facts = {"seconds": args.seconds, "rounds": args.rounds, "at once": args.at_once, "spans": spans}
    command = " ".join(["python -m benchmarks.observing.serving", *sys.argv[1:]])
    print(results_file.table(rows))
    print(facts, results_file.write(rows, device_name(), command, facts, args.out, "observing"))


if __name__ == "__main__":
    main()
