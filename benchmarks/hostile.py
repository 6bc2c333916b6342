"""Hostile grammars against a real server, and what its other streams notice.

    python -m benchmarks.hostile [--model demo | llama-3.1-8b] [--streams 16] [--tokens 400] [--backend llguidance]
        [--out FOLDER] [-- OPTIONS of `quire serve`]

The server is a process of its own, with random weights unless the model is the demo. Gaps: milliseconds between two
chunks of the streams that are free: alone, beside clients that ask for one hostile grammar after another, and beside
others that ask for harmless ones at the same moments and are taken or refused like those. Each hostile one must be
answered, taken or refused, within LIMIT seconds.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks import results_file, workloads
from benchmarks.results_file import Row
from benchmarks.serve_load import percentile

LIMIT = 2.0  # seconds
CLIENTS = 2  # that ask for hostile grammars at a time
START = 1.5  # seconds for the process of those clients
ANSWER = 8  # tokens of an answer under a grammar that is taken
TAKEN = {"json": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}
REFUSED = {"json": {"not": {"type": "string"}}}


class Answer(NamedTuple):
    status: int
    seconds: float  # to the first token or the refusal
    says: str


class Asked(NamedTuple):
    at: float  # seconds from when the first was asked
    name: str
    answer: Answer


def nested_unions(depth: int) -> Any:
    inner: Any = {"type": "integer"}
    for _ in range(depth):
        inner = {"oneOf": [inner, {"type": "object", "properties": {"k": inner}, "required": ["k"]}]}
    return inner


def chain(count: int, back: bool) -> Any:
    step = -1 if back else 1
    links = {f"d{i:05}": {"allOf": [{"$ref": f"#/$defs/d{i + step:05}"}]} for i in range(1, count)}
    ends = {"d00000": {"type": "null"}, f"d{count:05}": {"type": "null"}}
    return {"$ref": f"#/$defs/d{count - 1 if back else 1:05}", "$defs": {**links, **ends}}


def hostile() -> dict[str, dict[str, Any]]:
    """Values of structured_outputs by name."""
    bomb: Any = {f"l{i}": {"anyOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 9 + [{"type": "null"}]} for i in range(12)}
    bomb["l12"] = {"type": "object", "properties": {"v": {"type": "string"}}}
    deep: Any = {}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}} if not deep else {"items": deep}
    keys = {f"p{i}": {"type": "string", "pattern": f"^(a|b){{{i % 50}}}.*c$"} for i in range(390)}
    union = {"type": "json_schema", "json_schema": nested_unions(3)}
    words = "|".join(f"w{i}{'x' * (i % 7)}" for i in range(9000))
    rules = "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a" r{i + 1}' for i in range(40)) + '\nr40 ::= "x" | "y"'
    return {
        "nested unions": {"json": nested_unions(11)},
        "reference bomb": {"json": {"$ref": "#/$defs/l0", "$defs": bomb}},
        "references forward": {"json": chain(2500, False)},
        "references backward": {"json": chain(2500, True)},
        "nested 60 deep": {"json": deep},
        "nested 20,000 deep": {"json": '{"items":' * 20_000 + "{}" + "}" * 20_000},
        "enum of 25,000": {"json": {"enum": [f"v{i:05}" for i in range(25_000)]}},
        "union of 9,000": {"json": {"anyOf": [{"const": f"{i} {i * 7}"} for i in range(4_500)]}},
        "390 patterns": {"json": {"type": "object", "properties": keys}},
        "products of lengths": {
            "json": {"allOf": [{"anyOf": [{"maxLength": i + j} for j in range(9)]} for i in range(40)]}
        },
        "maxLength of 10^9": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
        "(a+)+$": {"regex": "(a+)+$"},
        "((a|aa)+)+b": {"regex": "((((a|aa)+)+)+)+b"},
        "states of .*a.{n}": {"regex": "(.*a.{20}){20}"},
        "repeats of repeats": {"regex": "((a{1,1000}){1,1000}){1,1000}b{9,99999}"},
        "nested 5,000 groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
        "9,000 words": {"regex": f"({words})*"},
        "64 KiB of a pattern": {"regex": "(a|b)*" * 10_000},
        "a megabyte of a pattern": {"regex": "ab?" * 350_000},
        "a pattern in JSON": {"json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$" + "(.*x){200}"}},
        "an ambiguous grammar": {"grammar": 'root ::= s\ns ::= s s s | s s | "a"'},
        "a doubling grammar": {"grammar": f"root ::= r0\n{rules}"},
        "left recursion": {"grammar": 'root ::= root "a" | root root | "b"'},
        "3,000 open groups": {"grammar": "root ::= " + "(" * 3000},
        "10,000 choices": {"choice": [f"choice {i} {i * i}" for i in range(10_000)]},
        "tags": {
            "structural_tag": {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [{"begin": f"<t{i}>", "content": union, "end": "<"} for i in range(300)],
            }
        },
    }


class Load:
    def __init__(self, url: str, model: str, backend: str) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=1000))
        self.model = model
        self.backend = backend

    async def neighbour(self, number: int, tokens: int) -> list[float]:
        """When each chunk came."""
        body = {"model": self.model, "prompt": f"Tell me about number {number}:", "max_tokens": tokens, "seed": number}
        body |= {"ignore_eos": True, "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            return [time.perf_counter() async for line in reply.aiter_lines() if line.startswith("data: {")]

    async def neighbours(self, streams: int, tokens: int) -> list[float]:
        """Gaps between chunks, seconds."""
        found = await asyncio.gather(*(self.neighbour(number, tokens) for number in range(streams)))
        return [later - earlier for times in found for earlier, later in itertools.pairwise(times)]

    async def ask(self, wish: dict[str, Any]) -> Answer:
        body: dict[str, Any] = {"model": self.model, "prompt": "x", "max_tokens": ANSWER, "stream": True}
        body["structured_outputs"] = {**wish, "backend": self.backend}
        began = time.perf_counter()
        async with self.client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                text = (await reply.aread()).decode()
                return Answer(reply.status_code, time.perf_counter() - began, text[:160])
            seconds = None
            async for line in reply.aiter_lines():
                if seconds is None and line.startswith("data: "):
                    seconds = time.perf_counter() - began
            return Answer(200, seconds or time.perf_counter() - began, "taken")

    async def attack(self, until: Event) -> list[Asked]:
        """Ask for each hostile grammar at least once, and again until the neighbours are done."""
        found: list[Asked] = []
        began = time.perf_counter()

        async def ask_each(wishes: Iterator[tuple[str, dict[str, Any]]]) -> None:
            for name, wish in wishes:
                if until.is_set() and any(asked.name == name for asked in found):
                    return
                at = time.perf_counter() - began
                found.append(Asked(at, name, await self.ask(wish)))

        wishes = itertools.cycle(hostile().items())
        await asyncio.gather(*(ask_each(wishes) for _ in range(CLIENTS)))
        return found

    async def imitate(self, until: Event, asked: list[Asked]) -> None:
        """Ask for harmless grammars when those were asked for, until the neighbours are done."""
        began = time.perf_counter()
        tasks = []
        for at, _, answer in sorted(asked):
            await asyncio.sleep(at - (time.perf_counter() - began))
            if until.is_set():
                break
            tasks.append(asyncio.create_task(self.ask(TAKEN if answer.status == 200 else REFUSED)))
        for asked_for, got in zip(sorted(asked), await asyncio.gather(*tasks), strict=False):
            assert got.status == asked_for.answer.status, got


# In a process of its own, so that what clients spend on hostile grammars is in nobody's gaps.

_ends: Event  # it can only be inherited


def attack(url: str, model: str, backend: str) -> list[Asked]:
    return asyncio.run(Load(url, model, backend).attack(_ends))


def imitate(url: str, model: str, backend: str, asked: list[Asked]) -> None:
    asyncio.run(Load(url, model, backend).imitate(_ends, asked))


def end_with(event: Event) -> None:
    global _ends
    _ends = event


async def measure(load: Load, streams: int, tokens: int) -> tuple[dict[str, list[float]], list[Asked]]:
    """Gaps of the neighbours in each case, and how the hostile clients fared."""
    where = (str(load.client.base_url), load.model, load.backend)
    await load.neighbours(streams, 16)
    await load.ask({"regex": "a{1,3}"})  # the tables of the vocabulary are there
    gaps = {"alone": await load.neighbours(streams, tokens)}
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Event()
    with ProcessPoolExecutor(1, spawn, end_with, (done,)) as process:

        async def beside(call: Callable[..., Any], *args: Any) -> tuple[list[float], Any]:
            done.clear()
            others = asyncio.wrap_future(process.submit(call, *where, *args))
            await asyncio.sleep(START)
            found = await load.neighbours(streams, tokens)
            done.set()
            return found, await others

        gaps["beside hostile"], asked = await beside(attack)
        gaps["beside harmless"], _ = await beside(imitate, asked)
    return gaps, asked


def serve_options(model: str) -> list[str]:
    if model == "demo":
        return []
    folder = workloads.write_model_dir(model, Path(tempfile.mkdtemp()) / model, tokenizer=True)
    return [str(folder), "--load-format", "dummy"]


def main() -> None:
    from tests.server.process import server_process

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", choices=["demo", *workloads.MODELS])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--backend", default="llguidance", choices=["llguidance", "xgrammar"])
    parser.add_argument("--device", default="cpu", help="what the results say they were measured on")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    parser.add_argument("options", nargs="*", help="of `quire serve`, behind --")
    args = parser.parse_args()
    options = [*serve_options(args.model), "--port", "0", "--served-model-name", "m", *args.options]
    with server_process("quire.cli.main", "serve", *options) as server:
        load = Load(server.url, "m", args.backend)
        gaps, asked = asyncio.run(measure(load, args.streams, args.tokens))
        assert server.process.poll() is None, "the server is gone"
    slowest: dict[str, Answer] = {}
    for _, name, answer in asked:
        slowest[name] = max(slowest.get(name, answer), answer, key=lambda one: one.seconds)
    rows = [
        Row("HG", args.model, case, f"gap_p{share}_ms", round(percentile(times, share) * 1e3, 3), "ms")
        for case, times in gaps.items()
        for share in (50, 90, 99)
    ]
    rows += [Row("HG", args.model, name, "answer_s", round(one.seconds, 3), "s") for name, one in slowest.items()]
    for name, one in sorted(slowest.items(), key=lambda each: -each[1].seconds):
        late = "  LATE" if one.seconds > LIMIT else ""
        print(f"{name:24} {one.status} {one.seconds:7.3f} s{late}  {one.says}")
    for row in rows[: 3 * len(gaps)]:
        print(f"{row.case:16} {row.metric:12} {row.value:8.2f}")
    settings = {
        **vars(args),
        "out": str(args.out),
        "asked": len(asked),
        "seconds": round(max(one.at for one in asked), 1),
        "says": {name: [one.status, one.says] for name, one in slowest.items()},
    }
    command = " ".join(["python -m benchmarks.hostile", *sys.argv[1:]])
    print(results_file.write(rows, args.device, command, settings, args.out, f"hostile-{args.backend}"))
    assert all(one.status in (200, 400) for one in slowest.values()), json.dumps(slowest, indent=1)


if __name__ == "__main__":
    main()
