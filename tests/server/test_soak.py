"""10,000 requests, and most clients walk away at any moment: nothing stays behind, and who stays gets an answer."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import psutil
import pytest

from tests.server.process import ServerProcess, server_process, wait_until

REQUESTS = 10_000
AT_ONCE = 64
WARM = 2_000  # after so many, memory has its final size
SLACK_BYTES = 24 * 1024**2  # allocators' own ups and downs, all processes together
PROMPTS = ["What is 12 + 30?", "What is the capital of Peru?", "Reverse these words: a, b, c"]


@pytest.mark.slow
def test_ten_thousand_requests_with_disconnects() -> None:
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
        before = memory(server)
        asyncio.run(storm(url, bodies, texts, REQUESTS - WARM, dice))
        assert wait_until(lambda: held(url) == (0, 0)), held(url)
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


def memory(server: ServerProcess) -> int:
    """Resident bytes of the server and its children."""
    process = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
