"""Hostile clients of a real server, and what its other streams notice.

    python -m benchmarks.hostile [--kind grammars | texts] [--model demo | llama-3.1-8b] [--streams 16] [--tokens 400]
        [--backend llguidance] [--out FOLDER] [-- OPTIONS of `quire serve`]

grammars: reference bombs, unions that double, regexes of 64 KiB, … texts: prompts of 1 MB and 30 MB. The server is a
process of its own, with random weights unless the model is the demo. Gaps: milliseconds between two chunks of the
streams that are free: alone, beside clients that ask for one hostile thing after another, and beside others that ask
for harmless ones at the same moments and are taken or refused like those. Each hostile one must be answered, taken or
refused, within LIMIT seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import results_file, workloads
from benchmarks.hostile.clients import Answer, Asked, Client, Kind, Post, attack, end_with, imitate, prepare
from benchmarks.hostile.grammars import Grammars
from benchmarks.hostile.texts import CHAT_TEMPLATE, MAKERS, SHORT, Texts
from benchmarks.results_file import Row
from benchmarks.serve_load import percentile

LIMIT = 2.0  # seconds
START = 1.0  # seconds from when the hostile clients get their work to the neighbours' streams
REFUSALS = (400, 413)
NAME = "m"
Gaps = dict[str, list[float]]  # seconds, by case


async def neighbour(client: Client, number: int, tokens: int) -> list[float]:
    """When each chunk came."""
    body = {"model": NAME, "prompt": f"Tell me about number {number}:", "max_tokens": tokens, "seed": number}
    body |= {"ignore_eos": True, "stream": True}
    async with client.http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        return [time.perf_counter() async for line in reply.aiter_lines() if line.startswith("data: {")]


async def neighbours(client: Client, streams: int, tokens: int) -> list[float]:
    """Gaps between chunks, seconds."""
    found = await asyncio.gather(*(neighbour(client, number, tokens) for number in range(streams)))
    return [later - earlier for times in found for earlier, later in itertools.pairwise(times)]


async def choose(client: Client, kind: str, backend: str) -> Kind:
    """What the server can do is there afterwards: the tables of the vocabulary, the processes that encode."""
    if kind == "grammars":
        free = {"regex": "a{1,3}", "backend": backend}
        await client.ask(Post("/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": free}))
        return Grammars(backend)
    found = [path for path, make in MAKERS.items() if (await client.ask(make(SHORT))).status == 200]
    await client.ask(MAKERS["/tokenize"](SHORT * 10_000))
    return Texts(tuple(found))


async def measure(client: Client, kind: Kind, streams: int, tokens: int) -> tuple[Gaps, list[Asked]]:
    """Gaps of the neighbours in each case, and how the hostile clients fared."""
    await neighbours(client, streams, 16)
    gaps = {"alone": await neighbours(client, streams, tokens)}
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Event()
    with ProcessPoolExecutor(1, spawn, end_with, (done,)) as process:
        await asyncio.wrap_future(process.submit(prepare))

        async def beside(call: Callable[..., Any], *args: Any) -> tuple[list[float], Any]:
            done.clear()
            others = asyncio.wrap_future(process.submit(call, str(client.http.base_url), NAME, kind, *args))
            await asyncio.sleep(START)
            found = await neighbours(client, streams, tokens)
            done.set()
            return found, await others

        gaps["beside hostile"], asked = await beside(attack)
        gaps["beside harmless"], _ = await beside(imitate, asked)
    return gaps, asked


async def run(url: str, args: argparse.Namespace) -> tuple[Gaps, list[Asked]]:
    client = Client(url, NAME)
    return await measure(client, await choose(client, args.kind, args.backend), args.streams, args.tokens)


def serve_options(model: str) -> list[str]:
    if model == "demo":
        return []
    folder = workloads.write_model_dir(model, Path(tempfile.mkdtemp()) / model, tokenizer=True)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return [str(folder), "--load-format", "dummy"]


def rows_of(test: str, model: str, gaps: Gaps, asked: list[Asked], slowest: dict[str, Answer]) -> list[Row]:
    rows = []

    def note(case: str, metric: str, value: float, unit: str) -> None:
        rows.append(Row(test, model, case, metric, round(value, 3), unit))

    for case, times in gaps.items():
        for share in (50, 90, 99):
            note(case, f"gap_p{share}_ms", percentile(times, share) * 1e3, "ms")
        note(case, "gap_longest_ms", max(times) * 1e3, "ms")
    refused = [one.answer.seconds for one in asked if one.answer.status != 200]
    note("hostile clients", "taken", len(asked) - len(refused), "")
    note("hostile clients", "refused", len(refused), "")
    if refused:
        note("hostile clients", "refusal_p50_ms", percentile(refused, 50) * 1e3, "ms")
        note("hostile clients", "refusal_longest_ms", max(refused) * 1e3, "ms")
    for row in rows:
        print(f"{row.case:16} {row.metric:18} {row.value:9.2f}")
    for name, one in slowest.items():
        note(name, "answer_s", one.seconds, "s")
    return rows


def slowest_of(asked: list[Asked]) -> dict[str, Answer]:
    """By name, the slowest first."""
    found: dict[str, Answer] = {}
    for _, name, answer in asked:
        found[name] = max(found.get(name, answer), answer, key=lambda one: one.seconds)
    found = dict(sorted(found.items(), key=lambda each: -each[1].seconds))
    for name, one in found.items():
        late = "  LATE" if one.seconds > LIMIT else ""
        print(f"{name:28} {one.status} {one.seconds:7.3f} s{late}  {one.says}")
    return found


def main() -> None:
    from tests.server.process import server_process

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="grammars", choices=["grammars", "texts"])
    parser.add_argument("--model", default="demo", choices=["demo", *workloads.MODELS])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--backend", default="llguidance", choices=["llguidance", "xgrammar"], help="of grammars")
    parser.add_argument("--device", default="cpu", help="what the results say they were measured on")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    parser.add_argument("options", nargs="*", help="of `quire serve`, behind --")
    args = parser.parse_args()
    options = [*serve_options(args.model), "--port", "0", "--served-model-name", NAME, *args.options]
    with server_process("quire.cli.main", "serve", *options) as server:
        gaps, asked = asyncio.run(run(server.url, args))
        assert server.process.poll() is None, "the server is gone"
    slowest = slowest_of(asked)
    rows = rows_of("HG" if args.kind == "grammars" else "HT", args.model, gaps, asked, slowest)
    settings = {
        **vars(args),
        "out": str(args.out),
        "asked": len(asked),
        "seconds": round(max(one.at for one in asked), 1),
        "says": {name: [one.status, one.says] for name, one in slowest.items()},
    }
    command = " ".join(["python -m benchmarks.hostile", *sys.argv[1:]])
    part = f"hostile-{args.backend if args.kind == 'grammars' else args.kind}"
    print(results_file.write(rows, args.device, command, settings, args.out, part))
    assert all(one.status in (200, *REFUSALS) for one in slowest.values()), json.dumps(slowest, indent=1)


if __name__ == "__main__":
    main()
