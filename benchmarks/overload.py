"""Overload: what a server still answers in time when more comes than it can do.

    python -m benchmarks.overload [--factors 1.4 5] [--seconds 60] [--options "--max-queue-seconds 0"] [--write]

The demo model on a CPU, or an engine of a given speed (`--null-rate`): what a busy machine does to the former is not
the door's doing. First the peak is measured: answers a second while a fixed number of clients, twice the seats, asks
again and again. Then requests come at multiples of that rate (Poisson), whatever becomes of them, from a process of its
own; a client waits 60 s for its first token (30 s from 3 x on) and then hangs up. After each of these half the peak
comes for `CALM` seconds. Good is an answer whose first token came within 5 s; windows are of 5 s, by the time of
sending. A told wait is kept if a request that is sent after it, once the overload has ended, is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import shlex
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results_file, workloads
from benchmarks.results_file import Row
from benchmarks.serve import Server
from benchmarks.serve_load import percentile

IN_TIME = 5.0  # seconds to the first token of a good answer
WINDOW = 5.0
CALM = 20.0
PEAK_SECONDS, PEAK_WARM_UP = 20.0, 5.0
TOKENS = 32
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "it",
    "sleeps",
    "for",
    "hours",
]
MODEL = "quire-demo"


@dataclass(slots=True)
class Seen:
    """One request; seconds since the start of its phase."""

    sent: float
    status: int = 0
    first: float | None = None  # its first token
    head: float | None = None  # its status line
    retry_after: int | None = None
    is_done: bool = False

    @property
    def is_good(self) -> bool:
        return self.first is not None and self.first - self.sent <= IN_TIME


def body(draw: random.Random) -> bytes:
    text = " ".join(draw.choices(WORDS, k=40))
    ask = {"prompt": text, "max_tokens": TOKENS, "stream": True, "ignore_eos": True, "temperature": 0.0}
    return json.dumps(ask).encode()


async def ask(session: Any, url: str, draw: random.Random, start: float, patience: float) -> Seen:
    from aiohttp import ClientError

    seen = Seen(time.monotonic() - start)
    try:
        async with asyncio.timeout(patience) as limit:
            headers = {"content-type": "application/json"}
            async with session.post(url, data=body(draw), headers=headers) as response:
                seen.status, seen.head = response.status, time.monotonic() - start
                if response.status != 200:
                    seen.retry_after = int(response.headers.get("retry-after", 0)) or None
                    return seen
                async for piece in response.content.iter_any():
                    if seen.first is None and b"data: {" in piece:
                        seen.first = time.monotonic() - start
                        limit.reschedule(None)
                seen.is_done = True
    except (TimeoutError, OSError, ClientError):
        pass
    return seen


def in_a_process(drive: Any, *arguments: Any) -> list[Seen]:
    """`drive(session, …)`, not to share an interpreter with anything."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_process, drive, arguments).result()


def _process(drive: Any, arguments: tuple[Any, ...]) -> list[Seen]:
    import aiohttp

    async def main() -> list[Seen]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            return await drive(session, *arguments)

    return asyncio.run(main())


async def closed_loop(session: Any, url: str, clients: int, seconds: float) -> list[Seen]:
    """So many clients, each of which asks again when it has its answer."""
    start, found = time.monotonic(), []

    async def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() - start < seconds:
            seen = await ask(session, url, draw, start, 60)
            found.append(seen)
            if seen.status != 200:
                await asyncio.sleep(1)

    await asyncio.gather(*map(client, range(clients)))
    return found


async def open_loop(session: Any, url: str, phases: list[tuple[float, float]], patience: float) -> list[Seen]:
    """phases: (requests a second, seconds). Nobody waits for an answer before the next request is sent."""
    draw, start = random.Random(7), time.monotonic()
    asking, at, begins = [], 0.0, 0.0
    for rate, seconds in phases:
        begins += seconds
        while at < begins:
            await asyncio.sleep(max(0.0, start + at - time.monotonic()))
            asking.append(asyncio.create_task(ask(session, url, draw, start, patience)))
            at += draw.expovariate(rate)
    return await asyncio.gather(*asking)


async def comes_again(session: Any, url: str, waits: list[int]) -> list[Seen]:
    """Requests that are sent after the seconds that they were told."""
    start = time.monotonic()

    async def client(wait: int) -> Seen:
        await asyncio.sleep(wait)
        return await ask(session, url, random.Random(wait), start, 60)

    return await asyncio.gather(*map(client, waits))


def measure_peak(url: str, clients: int) -> float:
    """Answers a second."""
    seen = in_a_process(closed_loop, url, clients, PEAK_SECONDS)
    refused = sum(s.status != 200 for s in seen)
    firsts = [s.first for s in seen if s.first is not None and PEAK_WARM_UP <= s.first < PEAK_SECONDS]
    peak = len(firsts) / (PEAK_SECONDS - PEAK_WARM_UP)
    print(f"peak: {peak:.1f} answers/s, {clients} clients, {refused} refused", flush=True)
    return peak


def measure(url: str, peak: float, factor: float, seconds: float) -> list[Row]:
    patience = 60.0 if factor < 3 else 30.0
    phases = [(factor * peak, seconds), (peak / 2, CALM)]
    seen = in_a_process(open_loop, url, phases, patience)
    rows = []

    def note(metric: str, value: float, unit: str) -> None:
        rows.append(Row("over", MODEL, f"{factor:g} x peak", metric, round(value, 4), unit))

    windows = [[s for s in seen if at <= s.sent < at + WINDOW] for at in _times(seconds + CALM)]
    good = [sum(s.is_good for s in window) / WINDOW for window in windows]
    during = good[: int(seconds / WINDOW)]
    print(f"{factor:g} x: good answers a second by window of {WINDOW:g} s: {' '.join(f'{g:.0f}' for g in good)}")
    note("good, share of peak", sum(during) / len(during) / peak, "")
    note("good, worst window", min(during) / peak, "")
    over = [s for s in seen if s.sent < seconds]
    refused = [s for s in over if s.status == 503]
    note("refused", len(refused) / len(over), "")
    answered = [s.first - s.sent for s in over if s.first is not None]
    note("first token p50", percentile(answered, 50), "s")
    note("first token p99", percentile(answered, 99), "s")
    taken = [s for s in over if s.status != 503]
    note("taken and never answered", sum(not s.is_done for s in taken) / max(1, len(taken)), "")
    if refused:
        latency = [1e3 * (s.head - s.sent) for s in refused if s.head is not None]
        note("refusal p50", percentile(latency, 50), "ms")
        note("refusal p99", percentile(latency, 99), "ms")
    after = [w for w, at in zip(windows, _times(seconds + CALM), strict=True) if at >= seconds]
    # Normal again: the first window after the drop from which on all of half the peak is answered in time.
    shares = [sum(s.is_good for s in window) / max(1, len(window)) for window in after]
    normal = next((i for i in range(len(shares)) if min(shares[i:]) >= 0.99), None)
    note("back to normal", math.nan if normal is None else normal * WINDOW, "s")
    waits = [s.retry_after for s in refused[-50:] if s.retry_after is not None]
    if waits:
        again = in_a_process(comes_again, url, waits)
        note("told wait p50", percentile(waits, 50), "s")
        note("told wait kept", sum(s.status == 200 for s in again) / len(again), "")
    for row in rows:
        print(f"    {row.metric:28}{row.value:10.3f} {row.unit}", flush=True)
    return rows


def _times(seconds: float) -> list[float]:
    return [i * WINDOW for i in range(int(seconds / WINDOW))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", nargs="+", type=float, default=[1.4, 5.0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=128, help="that measure the peak")
    parser.add_argument("--options", default="", help="of the server")
    parser.add_argument("--null-rate", default="", help="tokens/s of an engine without a model, for a busy machine")
    parser.add_argument("--part", default="overload", help="end of the name of the file of results")
    parser.add_argument("--write", action="store_true", help="write the figures to a file of results")
    args = parser.parse_args()
    with open(os.devnull, "w") as log, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "quire.cli.main", "serve"]
        model = Path(__file__).parent.parent / "quire" / "demo_model"
        options = ["--device", "cpu", "--dtype", "float32", "--served-model-name", MODEL, *shlex.split(args.options)]
        if args.null_rate:
            command = [sys.executable, "-m", "benchmarks.front_end", "serve", args.null_rate, ""]
            model = workloads.write_model_dir("tiny-qwen3", Path(folder) / MODEL, tokenizer=True)
            options += ["--max-num-seqs", "64", "--api-server-count", "1"]
        with Server(model, options, log, 120, command) as server:
            url = server.url + "/v1/completions"
            peak = measure_peak(url, args.clients)
            rows = [Row("over", MODEL, "closed loop", "peak", round(peak, 2), "answers/s")]
            for factor in args.factors:
                rows += measure(url, peak, factor, args.seconds)
    if args.write:
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        settings = {
            "seconds": args.seconds,
            "tokens": TOKENS,
            "server": args.options,
            "engine": f"no model, {args.null_rate} tokens/s" if args.null_rate else "the demo model",
            "load average at the end": load,
        }
        command = " ".join(["python -m benchmarks.overload", *sys.argv[1:]])
        device = f"cpu ({os.cpu_count()} threads)"
        print(results_file.write(rows, device, command, settings, part=args.part))


if __name__ == "__main__":
    main()
