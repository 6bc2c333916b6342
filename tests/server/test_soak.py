"""Most of thousands of clients walk away at any moment: nothing stays behind, and who stays gets an answer."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import psutil
import pytest

from tests.server.process import ServerProcess, server_process, wait_until

AT_ONCE = 64
WARM = 300  # after so many, every thread and file that the server keeps is there
SLACK_BYTES = 64 * 1024**2  # allocators' own ups and downs, all processes together
PROMPTS = ["What is 12 + 30?", "What is the capital of Peru?", "Reverse these words: a, b, c"]


@pytest.mark.parametrize("requests", [400, pytest.param(10_000, marks=pytest.mark.long)])
def test_clients_that_walk_away_leave_nothing_behind(requests: int) -> None:
    # Few KV blocks: memory that is touched for the first time is not memory that leaks.
    options = ["--port", "0", "--device", "cpu", "--num-gpu-blocks-override", "800"]
    with server_process("quire.cli.main", "serve", *options) as server:
        url = server.url
        bodies = [body(server, prompt) for prompt in PROMPTS]
        expected = [httpx.post(f"{url}/v1/chat/completions", content=b, timeout=60).json() for b in bodies]
        texts = [answer["choices"][0]["message"]["content"] for answer in expected]
        dice = random.Random(1)
        asyncio.run(storm(url, bodies, texts, WARM, dice))
        assert wait_until(lambda: held(url) == (0, 0))
        files, threads, before = files_of(server), threads_of(server), memory(server)
        asyncio.run(storm(url, bodies, texts, requests, dice))
        assert wait_until(lambda: held(url) == (0, 0)), held(url)
        assert wait_until(lambda: files_of(server) <= files), (files, files_of(server))
        assert threads_of(server) <= threads
        if requests >= 10_000:
            assert memory(server) < before + SLACK_BYTES
        for b, text in zip(bodies, texts, strict=True):
            answer = httpx.post(f"{url}/v1/chat/completions", content=b, timeout=60).json()
            assert answer["choices"][0]["message"]["content"] == text


def body(server: ServerProcess, prompt: str) -> bytes:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    messages = [{"role": "user", "content": prompt}]
    return json.dumps({"model": model, "messages": messages, "temperature": 0, "max_tokens": 40}).encode()


async def storm(url: str, bodies: list[bytes], texts: list[str], count: int, dice: random.Random) -> None:
    """`AT_ONCE` clients; two in three hang up after a random while, the others check their answer."""
    left = iter(range(count))

    async def client() -> None:
        for i in left:
            which, patience = i % len(bodies), dice.choice([None, dice.random() * 0.05, dice.random() * 0.5])
            try:
                async with asyncio.timeout(patience):
                    assert await ask(url, bodies[which]) == texts[which]
            except TimeoutError:
                pass  # gone: leaving `ask` closes the connection

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))


async def ask(url: str, content: bytes) -> str:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        answer = await reader.read()
    finally:
        writer.close()
    text: str = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
    return text


def held(url: str) -> tuple[float, float]:
    """(seats, share of the KV blocks) that requests hold."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()

    def gauge(name: str) -> float:
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name + "{")))

    return gauge("quire:seats_used"), gauge("vllm:kv_cache_usage_perc")


def processes(server: ServerProcess) -> list[psutil.Process]:
    """The server and its children."""
    process = psutil.Process(server.process.pid)
    return [process, *process.children(recursive=True)]


def files_of(server: ServerProcess) -> int:
    return sum(process.num_fds() for process in processes(server))


def threads_of(server: ServerProcess) -> int:
    return sum(process.num_threads() for process in processes(server))


def memory(server: ServerProcess) -> int:
    """Resident bytes."""
    return sum(process.memory_info().rss for process in processes(server))
