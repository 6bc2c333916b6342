"""T5: `quire serve` over HTTP, streamed, at Poisson arrivals, on one GPU.

    python -m benchmarks.serve [--model llama-3.1-8b] [--rates 4 16 32 64 inf] [--seconds 25] [--out FOLDER]
        [--options "--max-num-seqs 512"]

A real server process with random weights and a made-up tokenizer of the model's size: prompts are token ids, answers
are text. Each rate sends for `--seconds`, then all requests are waited for; "inf" sends 1,000 at once. Seconds run
from the first arrival slot to the last token. A gap is the time between two streamed chunks of a request, "mean" the
mean time of its tokens after the first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks import peers, results_file, serve_load, workloads
from benchmarks.results_file import Row

TEMPERATURE = 0.6
SHOWN_STALLS = 6
PEER_SECONDS = 25.0  # of the peers' windows
PHASES = ("idle", "hold", "inbox", "plan", "submit", "mask", "wait", "settle", "outbox")  # of the core's loop
Request = tuple[float, list[int], int]  # arrival, token ids, output length
COLUMNS = ("output_tok_s", "done_req_s", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "mean_p50_ms",
           "mean_p99_ms", "failed")  # fmt: skip


class Server:
    """A `quire serve` process on a free port, answering from the start of the `with` block to its end."""

    def __init__(
        self,
        model: Path,
        arguments: list[str],
        log: IO[str],
        start_seconds: float,
        command: Sequence[str] = (sys.executable, "-m", "quire.cli.main", "serve"),
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [*command, str(model), "--port", str(port), *arguments]
        self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._deadline = time.monotonic() + start_seconds

    def __enter__(self) -> Server:
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > self._deadline:
                self.__exit__()
                raise SystemExit(f"the server did not start (exit code {self._process.returncode})")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            return bool(urllib.request.urlopen(self.url + "/startupz", timeout=5).status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def metrics(self) -> dict[str, float]:
        """The numbers of /metrics by name, or by phase of the core's loop."""
        text = urllib.request.urlopen(self.url + "/metrics", timeout=10).read().decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        phases = {name.split('"')[-2]: float(value) for name, _, value in lines if 'phase="' in name}
        return {name.partition("{")[0]: float(value) for name, _, value in lines if "_bucket" not in name} | phases


def planned(model: str, requests: list[Request]) -> list[serve_load.Planned]:
    shared = {"model": model, "temperature": TEMPERATURE, "ignore_eos": True, "stream": True}
    return [
        serve_load.Planned(
            at,
            json.dumps(
                {**shared, "prompt": ids, "max_tokens": out, "stream_options": {"include_usage": True}}
            ).encode(),
            out,
        )
        for at, ids, out in requests
    ]


class Stall(NamedTuple):
    """A moment at which many streams went on after a long gap."""

    at: float  # seconds since the start
    gap: float  # seconds, the median
    streams: int


def stalls(start: float, seen: Sequence[serve_load.Seen], shortest: float = 0.1, together: float = 0.03) -> list[Stall]:
    """Gaps of `shortest` seconds and more that end within `together` seconds of each other, most streams first."""
    ends = sorted((b, b - a) for s in seen for a, b in zip(s.events, s.events[1:], strict=False) if b - a >= shortest)
    groups: list[list[tuple[float, float]]] = []
    for end, gap in ends:
        if not groups or end - groups[-1][0][0] > together:
            groups.append([])
        groups[-1].append((end, gap))
    found = [Stall(group[0][0] - start, statistics.median(gap for _, gap in group), len(group)) for group in groups]
    return sorted(found, key=lambda stall: -stall.streams)


def measure(
    server: Server, model: str, requests: list[tuple[float, list[int], int]], processes: int
) -> dict[str, float]:
    """Send `requests` and sum up; the names are those of COLUMNS."""
    start, seen = serve_load.run(server.url + "/v1/completions", planned(model, requests), processes)
    good = [s for s in seen if s.error is None and s.events]
    for error in sorted({s.error for s in seen if s.error is not None})[:5]:
        print(f"  failed: {error}", flush=True)
    seconds = max((s.events[-1] for s in good), default=start) - start or float("nan")
    first = [s.events[0] - s.sent for s in good]
    gaps = [b - a for s in good for a, b in zip(s.events, s.events[1:], strict=False)]
    means = [(s.events[-1] - s.events[0]) / (s.num_tokens - 1) for s in good if s.num_tokens > 1]
    late = serve_load.percentile([s.sent - s.due for s in seen], 99) * 1e3
    tokens = sum(s.num_tokens for s in good)
    chunks = sum(len(s.events) for s in good)
    print(f"  {len(seen)} requests, {seconds:.1f} s, {tokens} tokens in {chunks} chunks, client late by {late:.1f} ms "
          f"at p99; longest first {max(first, default=0) * 1e3:.0f} ms, gap {max(gaps, default=0) * 1e3:.0f} ms",
          flush=True)  # fmt: skip
    for stall in stalls(start, good)[:SHOWN_STALLS]:
        print(f"  {stall.streams} streams waited {stall.gap * 1e3:.0f} ms until {stall.at:.2f} s", flush=True)
    figures = {"output_tok_s": tokens / seconds, "done_req_s": len(good) / seconds, "failed": len(seen) - len(good)}
    for name, values in (("ttft", first), ("gap", gaps), ("mean", means)):
        for share in (50, 99):
            figures[f"{name}_p{share}_ms"] = serve_load.percentile(values, share) * 1e3
    return {name: figures[name] for name in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(workloads.MODELS))
    parser.add_argument("--rates", nargs="+", type=float, default=[4, 16, 32, 64, float("inf")])
    parser.add_argument("--seconds", type=float, default=PEER_SECONDS, help="of sending, at each finite rate")
    parser.add_argument("--requests", type=int, default=1000, help="sent at once at the rate inf")
    parser.add_argument("--processes", type=int, default=4, help="of the load generator")
    parser.add_argument("--start-seconds", type=float, default=120, help="the server may take to start")
    parser.add_argument("--options", default="", help="more arguments for `quire serve`")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    facts: dict[str, object] = {"seconds": args.seconds, "requests_at_once": args.requests, "options": args.options}
    with tempfile.TemporaryDirectory() as folder, (args.out / "serve.log").open("w") as log:
        model = workloads.write_model_dir(args.model, Path(folder) / args.model, tokenizer=True)
        arguments = ["--load-format", "dummy", "--served-model-name", args.model, *shlex.split(args.options)]
        began = time.monotonic()
        with Server(model, arguments, log, args.start_seconds) as server:
            facts["start_s"] = round(time.monotonic() - began, 2)
            print(f"server ready after {facts['start_s']} s; warm-up", flush=True)
            measure(server, args.model, [(0.0, ids, out) for ids, out in workloads.warmup(count=16)], args.processes)
            for rate in args.rates:
                print(f"T5 {args.model} {rate:g} requests/s", flush=True)
                requests = workloads.t5(rate, args.seconds, args.requests)
                before = server.metrics()
                figures = measure(server, args.model, requests, args.processes)
                after = server.metrics()
                steps = after["quire:steps_total"] - before["quire:steps_total"]
                busy = after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]
                facts[f"steps at {rate:g}"] = steps
                print("  " + "  ".join(f"{name} {value:,.1f}" for name, value in figures.items()), flush=True)
                spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in PHASES}
                shares = ", ".join(f"{name} {seconds:.2f}" for name, seconds in spent.items())
                print(
                    f"  {steps:.0f} steps; {busy:.1f} s of CPU in the front process; s of the core: {shares}",
                    flush=True,
                )
                for name, value in figures.items():
                    unit = "ms" if name.endswith("_ms") else name.removeprefix("output_").removeprefix("done_")
                    case = f"{layout(arguments)}rate={rate:g}"
                    peer = peers.best("T5", args.model, case, name) if device_name() == peers.DEVICE else None
                    rows.append(Row("T5", args.model, case, name, round(value, 3), unit, peer=peer))
    command = " ".join(["python -m benchmarks.serve", *sys.argv[1:]])
    path = results_file.write(rows, device_name(), command, facts, args.out, "serve")
    print(results_file.table(rows))
    if args.seconds != PEER_SECONDS:
        print(f"(the peers' windows were {PEER_SECONDS:g} s, these {args.seconds:g} s)")
    print(path)


def layout(arguments: list[str]) -> str:
    """How ranks share the work, for a row's case: "dp=2,"."""
    kinds = {"--tensor-parallel-size": "tp", "--pipeline-parallel-size": "pp", "--data-parallel-size": "dp"}
    pairs = itertools.pairwise(arguments)
    return "".join(f"{kinds[flag]}={count}," for flag, count in pairs if flag in kinds and count != "1")


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu-{os.cpu_count()}-threads"


if __name__ == "__main__":
    main()
