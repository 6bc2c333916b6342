"""Requests to a server that speaks OpenAI's API, and when what came back."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import numpy as np

from quire.cli.bench.report import spread
from quire.cli.bench.workload import Shot, WorkloadConfig, make_shots, read_shots
from quire.foundation.errors import ConfigError, InputError

UNKNOWN_VOCAB = 10_000  # ids below this exist in practically every model
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class ServeBenchConfig:
    url: str | None = None
    """Base URL of the server (--base-url is the same); None: http://HOST:PORT."""
    host: str = "127.0.0.1"
    """Host of the server."""
    port: int = 8000
    """Port of the server."""
    model: str | None = None
    """Model name to send; None: the server's first."""
    api_key: str | None = None
    """API key; QUIRE_API_KEY and OPENAI_API_KEY work too."""
    endpoint: Literal["completions", "chat"] = "completions"
    """What is asked: /v1/completions, with token ids, or /v1/chat/completions, with text, which any server has."""
    dataset: str | None = None
    """File of prompts: ShareGPT's conversations, messages, or objects with a prompt. None: random ones."""
    request_rate: float = math.inf
    """Requests a second, arriving at random (Poisson); inf: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier, more is more even."""
    max_concurrency: int | None = None
    """Most requests in flight."""
    num_warmups: int = 1
    """Requests that run, and are not counted, before the measurement."""
    vocab_size: int | None = None
    """Prompts draw token ids below this; None: what the server says, or 10000."""
    temperature: float = 0.0
    """Sampling temperature."""
    ignore_eos: bool = True
    """Generate output_len tokens whatever the model says; off for servers that do not know the field."""
    goodput_ttft: float | None = None
    """Milliseconds to the first token that a good request stays below."""
    goodput_tpot: float | None = None
    """Mean milliseconds a further token that a good request stays below."""
    repeats: int = 1
    """Times that all of it runs: what they differ by is the noise, which `quire bench compare` needs."""

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}", name)
        if self.repeats < 1:
            raise ConfigError(f"repeats must be >= 1, got {self.repeats}", "repeats")


@dataclass(slots=True)
class Timing:
    """One request as the client saw it; seconds."""

    input_len: int
    output_len: int = 0
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between chunks
    latency: float = 0.0
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


class LoadClient:
    def __init__(self, settings: ServeBenchConfig, workload: WorkloadConfig) -> None:
        self.settings = settings
        self.workload = workload
        self.url = (settings.url or f"http://{settings.host}:{settings.port}").rstrip("/").removesuffix("/v1")
        self.model = settings.model or ""

    async def measure(self) -> tuple[dict[str, Any], list[Timing]]:
        """Numbers of one run, and those of each request."""
        key = self.settings.api_key or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, headers=headers, timeout=timeout, connector=connector) as session:
            shots = self._shots(await self._ask_model(session))
            for shot in shots[: self.settings.num_warmups]:
                warm = await self._shoot(session, shot)
                if warm.error:
                    raise InputError(f"the warm-up request failed: {warm.error}", "url")
            started = time.perf_counter()
            timings = await self._shoot_all(session, shots)
            return self._numbers(timings, time.perf_counter() - started), timings

    def _shots(self, vocab_size: int) -> list[Shot]:
        if self.settings.dataset is not None:
            return read_shots(self.settings.dataset, self.workload)
        shots = make_shots(self.workload, vocab_size)
        if self.settings.endpoint == "chat":  # a number of up to four digits is a word of about one token
            shots = [Shot([], shot.output_len, " ".join(str(i % 10_000) for i in shot.token_ids)) for shot in shots]
        return shots

    async def _ask_model(self, session: aiohttp.ClientSession) -> int:
        """Learn the model's name; returns the vocabulary's size."""
        try:
            async with session.get("/v1/models") as response:
                reply = await response.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            raise InputError(f"no server answers at {self.url}: {why}", "url") from None
        if response.status != 200:
            raise InputError(f"{self.url}/v1/models answered {response.status}: {reply}", "url")
        cards = {card["id"]: card for card in reply["data"]}
        self.model = self.settings.model or next(iter(cards))
        return self.settings.vocab_size or cards.get(self.model, {}).get("vocab_size") or UNKNOWN_VOCAB

    async def _shoot_all(self, session: aiohttp.ClientSession, shots: Sequence[Shot]) -> list[Timing]:
        random = np.random.default_rng(self.workload.workload_seed)
        places = asyncio.Semaphore(self.settings.max_concurrency or len(shots))
        rate, shape = self.settings.request_rate, self.settings.burstiness

        async def limited(shot: Shot) -> Timing:
            async with places:
                return await self._shoot(session, shot)

        tasks = []
        due = time.perf_counter()
        for shot in shots:
            if math.isfinite(rate):
                due += random.gamma(shape, 1 / (rate * shape))
                await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(limited(shot)))
        return await asyncio.gather(*tasks)

    def _body(self, shot: Shot) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": shot.output_len,
            "temperature": self.settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.settings.ignore_eos:
            body["ignore_eos"] = True
        if self.settings.endpoint == "chat":
            return body | {"messages": [{"role": "user", "content": shot.text}]}
        return body | {"prompt": shot.token_ids if shot.text is None else shot.text}

    async def _shoot(self, session: aiohttp.ClientSession, shot: Shot) -> Timing:
        timing = Timing(len(shot.token_ids))
        started = last = time.perf_counter()
        try:
            async with session.post(PATHS[self.settings.endpoint], json=self._body(shot)) as response:
                if response.status != 200:
                    timing.error = f"{response.status} {(await response.text())[:200]}"
                    return timing
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.perf_counter()
                    event = json.loads(line[6:])
                    if "error" in event:
                        timing.error = str(event["error"])
                        return timing
                    if any(map(_has_text, event["choices"])):
                        if timing.ttft:
                            timing.gaps.append(now - last)
                        else:
                            timing.ttft = now - started
                        last = now
                    if event.get("usage"):
                        timing.output_len = event["usage"]["completion_tokens"]
                        timing.input_len = event["usage"]["prompt_tokens"]
                timing.latency = last - started
        except (aiohttp.ClientError, OSError) as error:
            timing.error = f"{type(error).__name__}: {error}"
        return timing

    def _numbers(self, timings: Sequence[Timing], seconds: float) -> dict[str, Any]:
        done = [t for t in timings if t.error is None]
        prompt, generated = sum(t.input_len for t in done), sum(t.output_len for t in done)
        numbers: dict[str, Any] = {
            "model_id": self.model,
            "num_prompts": len(timings),
            "completed": len(done),
            "failed": len(timings) - len(done),
            "duration": seconds,
            "total_input_tokens": prompt,
            "total_output_tokens": generated,
            "request_throughput": len(done) / seconds,
            "output_throughput": generated / seconds,
            "total_token_throughput": (prompt + generated) / seconds,
        }
        limits = self.settings.goodput_ttft, self.settings.goodput_tpot
        if limits != (None, None):
            numbers["request_goodput"] = sum(_is_good(t, *limits) for t in done) / seconds
        series = {
            "ttft": [t.ttft for t in done],
            "tpot": [t.tpot for t in done if t.tpot is not None],
            "itl": [gap for t in done for gap in t.gaps],
            "e2el": [t.latency for t in done],
        }
        for name, values in series.items():
            numbers |= {f"{statistic}_{name}_ms": value for statistic, value in spread(values, 1000.0).items()}
        return numbers


def _has_text(choice: dict[str, Any]) -> bool:
    """A chat's first event names the role alone. Tokens that are no text yet count: they were made."""
    return "delta" not in choice or set(choice["delta"]) != {"role", "content"} or bool(choice["delta"]["content"])


def _is_good(timing: Timing, ttft: float | None, tpot: float | None) -> bool:
    """Within the limits, in milliseconds."""
    return timing.ttft * 1000 <= (ttft or math.inf) and (timing.tpot or 0.0) * 1000 <= (tpot or math.inf)
