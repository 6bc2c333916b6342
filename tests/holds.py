"""How long one request keeps the interpreter of the front end from all others.

    python -m tests.holds [--only TEXT] [--slowest 40]

The server's app and HTTP stack in this process, in front of an engine that echoes; one client in a process of its own,
which sends one body after the other: each endpoint, long and short, texts and lists and ids, taken and refused. A
thread asks for the interpreter all the time: what it waits for is a hold, as far as this process computed meanwhile
(what other processes do to the machine is none of it). Milliseconds: the longest hold, the sum of those of more than
LONG, and the longest turn of the loop, in its processor time; and what the threads were at when the longest hold ended.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

PAUSE = 0.0002  # seconds between two looks
LONG = 0.0005  # seconds
KB, MB = 10**3, 10**6
WORDS = "The quick brown fox jumps over the lazy dog. "


class Hold(NamedTuple):
    seconds: float
    where: str


class Row(NamedTuple):
    """Of one body; milliseconds, but for the seconds to its answer."""

    longest: float
    total: float
    turn: float
    name: str
    status: int
    seconds: float
    says: str
    where: str


class Sampler(threading.Thread):
    """Wants the interpreter again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.holds: list[Hold] = []
        self.until = False

    def run(self) -> None:
        own = threading.get_ident()
        while not self.until:
            wall, cpu = time.perf_counter(), time.process_time()
            time.sleep(PAUSE)
            late = min(time.perf_counter() - wall - PAUSE, time.process_time() - cpu)
            if late > LONG:
                frames = [frame for number, frame in sys._current_frames().items() if number != own]
                self.holds.append(Hold(late, " | ".join(sorted(filter(None, map(_place, frames))))))


class Turns:
    """Of the loop, the longest; seconds of its processor time."""

    def __init__(self) -> None:
        self.longest = 0.0
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            before = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - before)

        asyncio.Handle._run = timed  # type: ignore[method-assign]


def _place(frame: Any) -> str:
    """Where a thread is, in our code; nothing of one that waits."""
    name = frame.f_code.co_name
    if name in ("wait", "select", "_worker", "run", "poll", "recv"):
        return ""
    inner = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
    while frame is not None and "/quire/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return inner
    return f"{inner} in {frame.f_code.co_filename.rpartition('/quire/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"


def words(size: int) -> str:
    return (WORDS * (size // len(WORDS) + 1))[:size]


def text_bodies(make: Callable[[str], Any]) -> dict[str, Any]:
    return {
        "short": make(words(40)),
        "100 KB": make(words(100 * KB)),
        "250 KB escaped": make('"\n' * (62 * KB)),
        "900 KB": make(words(900 * KB)),
        "900 KB escaped": make('"\n' * (225 * KB)),
        "900 KB of 4 bytes": make("𒀀𒁀𒂀𒃀" * (900 * KB // 16)),
        "30 MB": make(words(30 * MB)),
    }


def cases() -> dict[str, tuple[str, bytes]]:
    """Path and body by name."""
    user = lambda text: [{"role": "user", "content": text}]  # noqa: E731
    found: dict[str, tuple[str, Any]] = {}
    texts: dict[str, Callable[[str], tuple[str, Any]]] = {
        "completion": lambda text: ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        "completion cut": lambda t: ("/v1/completions", {"prompt": t, "max_tokens": 1, "truncate_prompt_tokens": 16}),
        "chat": lambda text: ("/v1/chat/completions", {"messages": user(text), "max_tokens": 1}),
        "tokenize": lambda text: ("/tokenize", {"prompt": text}),
        "count_tokens": lambda text: ("/v1/messages/count_tokens", {"model": "echo", "messages": user(text)}),
        "responses": lambda text: ("/v1/responses", {"input": text, "max_output_tokens": 1}),
        "unknown field": lambda text: ("/v1/completions", {"prompt": "a", "max_tokens": 1, "what": text}),
        "stop": lambda text: ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stop": text}),
    }
    for name, make in texts.items():
        for size, (path, body) in text_bodies(make).items():
            found[f"{name}, {size}"] = (path, body)
    for size in (200 * KB, 900 * KB, 30 * MB):
        label = f"{size // KB} KB"
        count = min(1000, size // 200)
        some, one, many = [words(size // count)] * count, [7] * (size // 2), [[1] * 50] * (size // 105)
        small, parts = user("x") * (size // 35), [{"type": "text", "text": "x"}] * (size // 30)
        found |= {
            f"completion, texts, {label}": ("/v1/completions", {"prompt": some, "max_tokens": 1}),
            f"completion, ids, {label}": ("/v1/completions", {"prompt": one, "max_tokens": 1}),
            f"completion, lists of ids, {label}": ("/v1/completions", {"prompt": many, "max_tokens": 1}),
            f"generate, ids, {label}": ("/inference/v1/generate", {"token_ids": one}),
            f"detokenize, {label}": ("/detokenize", {"tokens": one}),
            f"chat, many messages, {label}": ("/v1/chat/completions", {"messages": small, "max_tokens": 1}),
            f"chat, many parts, {label}": (
                "/v1/chat/completions",
                {"messages": user("") and [{"role": "user", "content": parts}], "max_tokens": 1},
            ),
            f"count_tokens, many messages, {label}": (
                "/v1/messages/count_tokens",
                {"model": "echo", "messages": small},
            ),
            f"responses, many items, {label}": ("/v1/responses", {"input": small, "max_output_tokens": 1}),
            f"tools, {label}": (
                "/v1/chat/completions",
                {
                    "messages": user("x"),
                    "max_tokens": 1,
                    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}] * (size // 75),
                },
            ),
            f"score items, {label}": ("/generative_scoring", {"query": "a", "items": some, "label_token_ids": [1]}),
            f"no JSON, {label}": ("/v1/completions", ("{" * 60 + " " * size).encode()),
        }
    return {
        name: (path, body if isinstance(body, bytes) else orjson.dumps(body)) for name, (path, body) in found.items()
    }


def send(address: tuple[str, int], pipe: Any, only: str) -> None:
    """The client's process."""
    for name, (path, body) in cases().items():
        if only not in name:
            continue
        pipe.send(("next", name))
        pipe.recv()
        connection = http.client.HTTPConnection(*address, timeout=120)
        began = time.perf_counter()
        connection.request("POST", path, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        says = reply.read()
        connection.close()
        pipe.send(("done", (reply.status, time.perf_counter() - began, says[:110].decode(errors="replace"))))
        pipe.recv()
    pipe.send(("end", None))


def main() -> None:
    from quire.foundation.heap import settle_heap
    from quire.foundation.threads import switch_soon
    from tests.server.conftest import echo_server

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bodies whose name holds this")
    parser.add_argument("--slowest", type=int, default=0, help="so many only, longest hold first")
    args = parser.parse_args()
    switch_soon()
    turns = Turns()
    spawn = multiprocessing.get_context("spawn")
    with echo_server() as server:
        settle_heap()
        ours, theirs = spawn.Pipe()
        client = spawn.Process(target=send, args=(server.address, theirs, args.only), daemon=True)
        client.start()
        found = []
        name = ""
        sampler = Sampler()
        while (message := ours.recv())[0] != "end":
            if message[0] == "next":
                name, sampler = message[1], Sampler()
                gc.collect()
                turns.longest = 0.0
                sampler.start()
            else:
                time.sleep(0.02)
                sampler.until = True
                sampler.join()
                worst = max(sampler.holds, default=Hold(0.0, ""))
                total = sum(hold.seconds for hold in sampler.holds)
                row = Row(worst.seconds * 1e3, total * 1e3, turns.longest * 1e3, name, *message[1], worst.where)
                found.append(row)
                if not args.slowest:
                    show(row)
            ours.send(None)
    if args.slowest:
        for row in sorted(found, reverse=True)[: args.slowest]:
            show(row)


def show(row: Row) -> None:
    times = f"{row.longest:8.2f} {row.total:8.1f} {row.turn:8.2f}"
    print(f"{times}  {row.name:36} {row.status} {row.seconds:6.2f} s  {row.where}", flush=True)


if __name__ == "__main__":
    main()
