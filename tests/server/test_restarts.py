"""kill -9 of the core and of the worker under many streams of every kind: each says what it says undisturbed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.process import ServerProcess, server_process, status_of, wait_until
from tests.server.several.test_front_ends import metrics

MODEL = "quire-demo"
KINDS = 14  # of `requests`; one of each is enough for a look
STREAMS = 60
CORE, WORKER = "quire.engine.process", "quire.executor.worker_process"
HI = [{"role": "user", "content": "Hello, who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 4}},
    "required": ["names"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def serve(folder: Path, *arguments: str) -> Any:
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "1200"]
    options += ["--batch-dir", str(folder), "--max-num-seqs", "48"]
    return server_process("quire.cli.main", "serve", *options, *arguments)


# -- requests ----------------------------------------------------------------------------------------------------


def completion(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"prompt": f"Question {number}: what is", "max_tokens": 100, "ignore_eos": True, "temperature": 0.8}
    return "/v1/completions", {"request_id": f"same-{number}", "stream": True, **body, **fields}


def chat(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": f"What is {number} + {number + 3}?"}]
    body = {"messages": messages, "max_tokens": 90, "seed": number, "temperature": 0.8}
    return "/v1/chat/completions", {"stream": True, **body, **fields}


def requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies. Those without a seed have an id, from which their seed follows."""
    counted = {"stream_options": {"include_usage": True}}
    form = {"type": "json_schema", "json_schema": {"name": "names", "schema": SCHEMA}}
    kinds = [
        lambda n: completion(n, temperature=0),
        lambda n: completion(n, **counted),
        lambda n: completion(n, seed=n, logprobs=2),
        lambda n: completion(n, seed=n, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=40),
        lambda n: completion(n, temperature=0, stop=["capital", "chemical", "number"], min_tokens=12),
        lambda n: completion(n, seed=n, n=2, bad_words=["is"]),
        lambda n: completion(n, seed=n, stream=False, max_tokens=60),
        lambda n: completion(n, seed=n, stream=False, logprobs=1, prompt_logprobs=1),
        lambda n: chat(n, **counted),
        lambda n: chat(n, response_format=form, **counted),
        lambda n: chat(n, tools=[WEATHER], tool_choice="required"),
        lambda n: ("/v1/responses", {"input": f"Count to {n}", "stream": True, "store": False, "temperature": 0}),
        lambda n: ("/v1/messages", {"messages": HI, "max_tokens": 60 + n, "stream": True, "temperature": 0}),
        lambda n: completion(n, use_beam_search=True, n=2, temperature=0, max_tokens=12, stream=False),
    ]
    assert len(kinds) == KINDS
    found = [kinds[number % KINDS](number) for number in range(count)]
    return [(path, {"model": MODEL, **body}) for path, body in found]


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the reply comes to, less what differs from call to call."""
    if not body.get("stream"):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return summary(path, [response.json()])
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines()]
    return summary(path, [json.loads(line[6:]) for line in lines if line.startswith("data: {")])


def summary(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    assert not any("error" in event and event["error"] for event in events), events[-1]
    if path == "/v1/responses":
        final = events[-1]["response"]
        assert final["error"] is None, final["error"]
        deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(len(events)))
        return {"text": "".join(deltas), "usage": final["usage"]["output_tokens"], "status": final["status"]}
    if path == "/v1/messages":
        deltas = [event["delta"] for event in events if "delta" in event]
        text = "".join(delta.get("text", "") + delta.get("thinking", "") for delta in deltas)
        usage = next(event["usage"]["output_tokens"] for event in events if event["type"] == "message_delta")
        return {"text": text, "usage": usage, "end": [d["stop_reason"] for d in deltas if d.get("stop_reason")]}
    found: dict[str, Any] = {}
    for event in events:
        if event.get("usage"):
            found["usage"] = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            part = found.setdefault(str(choice["index"]), {"text": "", "calls": "", "tokens": [], "end": None})
            part["end"] = choice["finish_reason"] or part["end"]
            said = choice.get("delta") or choice.get("message") or {}
            part["text"] += choice.get("text") or said.get("content") or ""
            part["text"] += said.get("reasoning") or ""
            for call in said.get("tool_calls") or []:
                part["calls"] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            part["tokens"] += (choice.get("logprobs") or {}).get("tokens") or []
            if choice.get("prompt_logprobs"):
                part["scored"] = part.get("scored", 0) + len(choice["prompt_logprobs"])
    return found


async def ask_all(url: str, count: int) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        return await asyncio.gather(*(ask(client, path, body) for path, body in requests(count)))


# -- deaths ------------------------------------------------------------------------------------------------------


def processes(server: ServerProcess, module: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if module in child.cmdline():
                found.append(child)
    return found


class Killer:
    """Kills the core and the worker in turn, at random moments: amid streams, amid prompts, amid a start."""

    def __init__(self, server: ServerProcess, count: int, modules: list[str], dice: random.Random) -> None:
        self.left = count
        self._server, self._dice = server, dice
        self._modules = itertools.cycle(modules)

    async def run(self) -> None:
        url = self._server.url
        while self.left:
            if self._dice.random() < 0.7:
                while await asyncio.to_thread(status_of, f"{url}/readyz") != 200:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(self._dice.random() ** 2 * 1.5)
            module = next(self._modules)
            for victim in processes(self._server, module):
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
                    self.left -= 1


async def disturbed(server: ServerProcess, killer: Killer, expected: list[dict[str, Any]]) -> None:
    killing = asyncio.create_task(killer.run())
    while killer.left:
        found = await ask_all(server.url, len(expected))
        for (path, body), is_now, was in zip(requests(len(expected)), found, expected, strict=True):
            assert is_now == was, (path, body)
    await killing


@pytest.mark.parametrize("arguments", [
    pytest.param(["--distributed-executor-backend", "mp"], id="worker of its own"),
    pytest.param(["--api-server-count", "2"], id="two front ends", marks=pytest.mark.long),
])  # fmt: skip
@pytest.mark.parametrize(("count", "kills"), [(KINDS, 2), pytest.param(STREAMS, 20, marks=pytest.mark.long)])
def test_every_stream_goes_on(tmp_path: Path, arguments: list[str], count: int, kills: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    with serve(tmp_path, "--max-engine-restarts", "50", *arguments) as server:
        expected = asyncio.run(ask_all(server.url, count))
        assert wait_until(lambda: metrics(server)["vllm:num_requests_running"] == 0)
        before = metrics(server)
        modules = [CORE, WORKER] if "mp" in arguments else [CORE]
        asyncio.run(disturbed(server, Killer(server, kills, modules, random.Random(seed)), expected))
        assert wait_until(lambda: metrics(server)["vllm:num_requests_running"] == 0)
        assert wait_until(lambda: metrics(server)["quire:kv_blocks_free"] == before["quire:kv_blocks"])
        after = metrics(server)
        fallen = [name for name in before if name.endswith(("_total", "_count")) and after[name] < before[name]]
        assert not [name for name in fallen if not name.startswith("process_")]
        assert 1 <= after["quire:engine_restarts_total"] <= kills
        said = "".join(server.err)
        assert said.count("the engine died:") == said.count("the engine is back after") >= 1
        assert "Traceback" not in said
