"""Clients that ask a server for hostile things, or for harmless ones at the same moments; for `benchmarks.hostile`.

They have a process of their own, so that what they spend on hostile requests is in nobody's gaps.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple, Protocol

import httpx

CLIENTS = 2  # that ask for hostile things at a time


class Post(NamedTuple):
    path: str
    body: dict[str, Any]  # without the model


class Kind(Protocol):
    """What hostile clients ask for; it is sent to their process."""

    def hostile(self) -> dict[str, Post]:
        """By name."""
        ...

    def harmless(self, post: Post, is_taken: bool) -> Post:
        """What is asked for in place of a hostile one, and is taken or refused like it."""
        ...


class Answer(NamedTuple):
    status: int
    seconds: float  # to the first token, to the end of an answer that is no stream, or to the refusal
    says: str


class Asked(NamedTuple):
    at: float  # seconds from when the first was asked
    name: str
    answer: Answer


class Client:
    """A connection pool to one server, of one model."""

    def __init__(self, url: str, model: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=1000))
        self.model = model

    def content(self, post: Post) -> bytes:
        return json.dumps({"model": self.model, **post.body}, ensure_ascii=False).encode()

    async def ask(self, post: Post) -> Answer:
        return await self.send(post.path, self.content(post))

    async def send(self, path: str, content: bytes) -> Answer:
        headers = {"content-type": "application/json"}
        began = time.perf_counter()
        async with self.http.stream("POST", path, content=content, headers=headers) as reply:
            if reply.status_code != 200:
                text = (await reply.aread()).decode()
                return Answer(reply.status_code, time.perf_counter() - began, text[:160])
            seconds = None
            async for piece in reply.aiter_raw():
                if seconds is None and b"data: " in piece:
                    seconds = time.perf_counter() - began
            return Answer(200, seconds or time.perf_counter() - began, "taken")


async def _attack(client: Client, contents: dict[str, tuple[str, bytes]], until: Event) -> list[Asked]:
    found: list[Asked] = []
    began = time.perf_counter()

    async def ask_each(names: Iterator[str]) -> None:
        for name in names:
            if until.is_set() and any(asked.name == name for asked in found):
                return
            at = time.perf_counter() - began
            found.append(Asked(at, name, await client.send(*contents[name])))

    names = itertools.cycle(contents)
    await asyncio.gather(*(ask_each(names) for _ in range(CLIENTS)))
    return found


async def _imitate(client: Client, posts: list[tuple[float, Post, int]], until: Event) -> None:
    """posts: when to ask for what, and the status that must come."""
    began = time.perf_counter()
    tasks: list[asyncio.Task[Answer]] = []
    for at, post, _ in posts:
        await asyncio.sleep(at - (time.perf_counter() - began))
        if until.is_set():
            break
        tasks.append(asyncio.create_task(client.ask(post)))
    for (_, post, status), got in zip(posts, await asyncio.gather(*tasks), strict=False):
        assert (got.status == 200) == (status == 200), (post, got)


# The functions of the process.

_until: Event  # the neighbours are done; an event can only be inherited


def end_with(event: Event) -> None:
    global _until
    _until = event


def prepare() -> bool:
    """Its modules are imported."""
    return True


def attack(url: str, model: str, kind: Kind) -> list[Asked]:
    """Ask for each hostile thing at least once, and again until the neighbours are done."""
    client = Client(url, model)
    contents = {name: (post.path, client.content(post)) for name, post in kind.hostile().items()}
    return asyncio.run(_attack(client, contents, _until))


def imitate(url: str, model: str, kind: Kind, asked: list[Asked]) -> None:
    """Ask for harmless things when hostile ones were asked for, until the neighbours are done."""
    hostile = kind.hostile()
    posts = [
        (at, kind.harmless(hostile[name], answer.status == 200), answer.status) for at, name, answer in sorted(asked)
    ]
    asyncio.run(_imitate(Client(url, model), posts, _until))
