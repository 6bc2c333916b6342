"""A long body is in nobody's way: the front end never has it in its hands, whatever it holds and whoever it is for."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from fastapi import FastAPI
from starlette.types import Message

from quire.config.serve import ServeConfig
from quire.server.app import build_app
from quire.server.http import body as bodies
from quire.server.http import long_body
from quire.server.service import Service
from tests.server.echo_llm import EchoLLM
from tests.server.process import PATIENCE
from tests.server.test_freezes import GENERATING

CHUNK = 64 * 1024  # bytes, as they come from a socket
AT_ONCE = 160 * 1024  # bytes that a single call here may read or write
MB = 1024 * 1024
Run = Callable[[Callable[[], Awaitable[Any]]], Any]
WORDS = "The quick brown fox, Größe and 世界. "


def new_app(**options: Any) -> FastAPI:
    llm = EchoLLM(served_model_name=["echo"], **options)
    service = Service(llm.info.resolved.config, ServeConfig(port=0))
    service.attach(llm)  # type: ignore[arg-type]
    return build_app(service)


class Posted:
    """A request that comes in chunks, made as they are taken. leave: the client has gone."""

    def __init__(self, app: FastAPI, path: str, chunks: Iterator[bytes]) -> None:
        self.leave = asyncio.Event()
        self.status, self.size, self.reply, self.is_sent = 0, 0, b"", False
        self._app, self._path, self._chunks = app, path, chunks

    async def run(self) -> Posted:
        scope = {"type": "http", "method": "POST", "path": self._path, "raw_path": self._path.encode()}
        scope |= {"headers": [(b"content-type", b"application/json")], "query_string": b"", "root_path": ""}
        await self._app(scope, self._receive, self._send)
        return self

    async def _receive(self) -> Message:
        await asyncio.sleep(0)
        chunk = next(self._chunks, None)
        if chunk is not None:
            return {"type": "http.request", "body": chunk, "more_body": True}
        if not self.is_sent:
            self.is_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            part = message.get("body", b"")
            assert len(part) <= AT_ONCE
            self.size += len(part)
            self.reply += part if self.size < 4096 else b""


def chunks_of(raw: bytes) -> Iterator[bytes]:
    return (raw[start : start + CHUNK] for start in range(0, len(raw), CHUNK))


def long_values(size: int) -> dict[str, Any]:
    """Of about `size` bytes each."""
    return {
        "text": (WORDS * (size // 40))[:size],
        "escaped": '"\n' * (size // 4),
        "texts": ["ab"] * (size // 5),
        "numbers": [97] * (size // 3),
        "lists": [[97]] * (size // 5),
        "messages": [{"role": "user", "content": "x"}] * (size // 31),
        "message": [{"role": "user", "content": "ab " * (size // 3)}],
        "parts": [{"role": "user", "content": [{"type": "text", "text": "x"}] * (size // 26)}],
        "wrong": [{"role": 5}] * (size // 11),
    }


FIELDS = {
    "/v1/completions": ("prompt", "suffix", "unknown"),
    "/v1/completions/render": ("prompt",),
    "/v1/chat/completions": ("messages", "tools", "documents"),
    "/v1/chat/completions/batch": ("messages",),
    "/v1/chat/completions/render": ("messages",),
    "/v1/responses/input_tokens": ("input", "instructions"),
    "/v1/messages": ("messages", "system"),
    "/v1/messages/count_tokens": ("messages", "system"),
    "/inference/v1/generate": ("token_ids",),
    "/generative_scoring": ("items", "query"),
    "/tokenize": ("prompt", "messages"),
    "/detokenize": ("tokens",),
    "/v1/batches": ("metadata", "input_file_id"),
}


class Calls:
    """Calls that hold the interpreter while they read or write JSON or msgpack, in all of our modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest = 0
        self.number = 0
        coders = (msgspec.json.Decoder, msgspec.json.Encoder, msgspec.msgpack.Decoder, msgspec.msgpack.Encoder)
        calls = (msgspec.msgpack.encode, msgspec.msgpack.decode, orjson.loads, orjson.dumps)
        whole = {"msgspec": self._packages(msgspec), "orjson": self._package(orjson, ("loads", "dumps"))}
        for name, module in list(sys.modules.items()):
            if not name.startswith("quire."):
                continue
            for attribute, value in list(vars(module).items()):
                if attribute in whole:
                    monkeypatch.setattr(module, attribute, whole[attribute])
                elif isinstance(value, coders):
                    monkeypatch.setattr(module, attribute, self._package(value, ("decode", "encode")))
                elif any(value is call for call in calls):
                    monkeypatch.setattr(module, attribute, self._noted(value))

    def _packages(self, package: Any) -> Any:
        names = ("decode", "encode")
        inner = {"json": self._package(package.json, names), "msgpack": self._package(package.msgpack, names)}
        return _Stand(package, inner)

    def _package(self, package: Any, names: tuple[str, ...]) -> Any:
        return _Stand(package, {name: self._noted(getattr(package, name)) for name in names if hasattr(package, name)})

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(value: Any, *args: Any, **kwargs: Any) -> Any:
            found = call(value, *args, **kwargs)
            for one in (value, found):
                if isinstance(one, bytes | bytearray | memoryview | str | msgspec.Raw):
                    size = len(one) if isinstance(one, str) else memoryview(one).nbytes
                    self.longest = max(self.longest, size)
            self.number += 1
            return found

        return noted


class _Stand:
    """In the place of a module or a coder, with some of its calls noted."""

    def __init__(self, real: Any, noted: dict[str, Any]) -> None:
        self.__dict__.update(noted)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One for all, so that the process which reads is started once."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def run(loop: asyncio.Runner) -> Run:
    def run(work: Callable[[], Awaitable[Any]]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(2 * PATIENCE):
                return await work()

        return loop.run(limited())

    return run


@pytest.fixture(scope="module")
def app(loop: asyncio.Runner) -> FastAPI:
    del loop  # it ends behind the app's processes
    return new_app()


def test_calls_are_seen(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is below proves nothing if the front end could read a body unseen."""
    calls, app = Calls(monkeypatch), new_app()
    monkeypatch.setattr(long_body, "LONG_BODY", 1 << 40)
    monkeypatch.setattr(bodies, "LONG_BODY", 1 << 40)
    monkeypatch.setattr(bodies, "MANY_VALUES", 1 << 40)
    raw = orjson.dumps({"prompt": "ab " * 300_000})
    assert run(Posted(app, "/v1/completions", chunks_of(raw)).run).status == 400
    assert calls.longest > 900_000


@pytest.mark.parametrize("share", [0.15, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("path", FIELDS)
def test_no_call_of_the_front_end_reads_or_writes_much(
    app: FastAPI, run: Run, path: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, draw = Calls(monkeypatch), random.Random(path)

    async def work() -> None:
        for field in FIELDS[path]:
            for shape, value in long_values(600_000).items():
                if draw.random() > share and shape != "text":
                    continue
                raw = orjson.dumps(GENERATING[path] | {field: value})
                posted = await Posted(app, path, chunks_of(raw)).run()
                assert posted.status in (200, 400), (field, shape, posted.reply)
                assert calls.longest <= AT_ONCE, (field, shape)
                assert calls.number, "was anything looked at?"

    run(work)


@pytest.mark.parametrize("tail", [b'"}', b'", "max_tokens": "many"}', b""])
def test_the_front_end_has_no_memory_of_a_body(app: FastAPI, run: Run, tail: bytes) -> None:
    """30 MB pass through, over and over, and no more than some chunks of it are ever there."""

    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(30 * MB // CHUNK):
            yield b"abcdefgh" * (CHUNK // 8)
        yield tail

    async def work() -> tuple[int, int, int]:
        await Posted(app, "/v1/completions", chunks()).run()
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(2):
                posted = await Posted(app, "/v1/completions", chunks()).run()
                assert posted.status == 400, posted.reply
            gc.collect()
            return before, *tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    gc.collect()  # clients that another test left open close themselves if a loop runs, and are told off at length
    before, after, peak = run(work)
    assert peak - before < 4 * MB
    assert after - before < MB // 4
    service: Service = app.state.service
    assert service.long_bodies is not None
    assert service.long_bodies.num_bodies == 0
    assert service.long_bodies.num_bytes == 0


def children(pid: int | None) -> list[str]:
    """None if the process has ended."""
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return file.read_text(encoding="ascii").split() if file.exists() else []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts processes as Linux tells them")
def test_a_client_that_leaves_ends_what_is_done_for_it(app: FastAPI, run: Run) -> None:
    held: long_body.LongBodies = app.state.service.long_bodies
    slow = orjson.dumps({"prompt": "".join(map(chr, range(0x4E00, 0x9000))) * 40})

    async def work() -> None:
        posted = Posted(app, "/tokenize", chunks_of(slow))
        task = asyncio.create_task(posted.run())
        while not children(held.pid) or not posted.is_sent:
            assert not task.done()
            await asyncio.sleep(0.001)
        posted.leave.set()
        await task
        assert posted.status == 499
        assert held.num_bodies == held.num_bytes == 0
        while children(held.pid):
            await asyncio.sleep(0.001)

    run(work)


def test_bodies_are_bounded_and_short_ones_do_not_wait(app: FastAPI, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    held: long_body.LongBodies = app.state.service.long_bodies
    long = orjson.dumps({"prompt": "ab " * 100_000, "max_tokens": 1})

    async def work() -> None:
        monkeypatch.setattr(long_body, "MAX_BODIES", 3)
        opened = [asyncio.create_task(held.open()) for _ in range(3)]
        await asyncio.wait(opened)
        refused = await Posted(app, "/v1/completions", chunks_of(long)).run()
        assert refused.status == 503, refused.reply
        short = await Posted(app, "/v1/completions", chunks_of(b'{"prompt": "a", "max_tokens": 1}')).run()
        assert short.status == 200
        for one in opened:
            one.result().close()
        assert (await Posted(app, "/v1/completions", chunks_of(long)).run()).status == 400
        monkeypatch.setattr(long_body, "MAX_BYTES", 200_000)
        refused = await Posted(app, "/v1/completions", chunks_of(long)).run()
        assert refused.status == 503
        assert b"MiB together" in refused.reply
        assert held.num_bodies == held.num_bytes == 0

    run(work)


def test_a_reader_that_dies_is_replaced(app: FastAPI, run: Run) -> None:
    held: long_body.LongBodies = app.state.service.long_bodies
    long = orjson.dumps({"prompt": "ab " * 300_000, "truncate_prompt_tokens": 5, "max_tokens": 1})

    def dying() -> Iterator[bytes]:
        for number, chunk in enumerate(chunks_of(long)):
            if number == 5:
                assert held.pid is not None
                os.kill(held.pid, signal.SIGKILL)
            yield chunk

    async def work() -> None:
        assert (await Posted(app, "/v1/completions", chunks_of(long)).run()).status == 200
        lost = await Posted(app, "/v1/completions", dying()).run()
        assert lost.status == 503, lost.reply
        assert (await Posted(app, "/v1/completions", chunks_of(long)).run()).status == 200

    run(work)


def test_a_priority_is_read_there_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where priorities count, the door asks for it before anything else does."""
    app = new_app(scheduling_policy="priority")
    seen: list[int] = []
    door = app.state.service.door
    monkeypatch.setattr(door, "enter", lambda priority: (seen.append(priority), type(door).enter(door, priority))[1])

    async def work() -> None:
        for priority in (-7, "x"):
            raw = orjson.dumps({"prompt": "ab " * 100_000, "priority": priority})
            assert (await Posted(app, "/v1/completions", chunks_of(raw)).run()).status == 400

    run(work)
    assert seen == [-7, 0]


def without_ids(reply: Any) -> Any:
    if isinstance(reply, dict):
        return {key: without_ids(value) for key, value in reply.items() if key not in VARYING}
    return [without_ids(item) for item in reply] if isinstance(reply, list) else reply


def told(app: FastAPI, path: str, fields: dict[str, Any]) -> Any:
    async def work() -> Any:
        posted = await Posted(app, path, chunks_of(orjson.dumps(GENERATING[path] | fields))).run()
        return posted.status, without_ids(orjson.loads(posted.reply)) if posted.size < 4096 else posted.size

    return work


VARYING = ("id", "created", "created_at", "request_id")
ODD = [
    *long_values(40).values(),
    *long_values(9000).values(),
    None,
    [],
    "",
    5,
    [[]],
    [5.5],
    [-1],
    [2**40],
    [300],
    [None],
    {"a": 1},
    ["a", 5],
    "\ud7ff\0",
    [{"role": "assistant", "content": "and so"}],
]


@pytest.mark.parametrize("share", [0.15, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("path", FIELDS)
def test_answers_are_those_of_short_bodies(
    app: FastAPI, run: Run, path: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a body is read here or there: same status, same words."""
    others: list[dict[str, Any]] = [{}, {"model": "other"}, {"echo": True, "n": 2}, {"truncate_prompt_tokens": 3}]
    asked = [{field: value} for field in FIELDS[path] for value in ODD]
    asked += [{**other, field: "abc" if field != "messages" else ODD[-1]} for field in FIELDS[path] for other in others]

    draw = random.Random(path)
    asked = [fields for fields in asked if draw.random() <= share]

    async def work() -> None:
        here = [await told(app, path, fields)() for fields in asked]
        monkeypatch.setattr(bodies, "LONG_BODY", 0)
        for fields, expected in zip(asked, here, strict=True):
            assert await told(app, path, fields)() == expected, fields

    run(work)
