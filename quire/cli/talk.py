"""A model to talk to from a terminal: an engine in this process, or a server behind a URL."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import ssl
import sys
import time
import urllib.parse
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from quire.config.engine import EngineConfig
from quire.foundation.errors import InputError
from quire.types.sampling import RequestOutputKind, SamplingParams

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class TalkConfig:
    url: str | None = None
    """Base URL of a server (http://localhost:8000/v1; --base-url is the same). None: the model runs in this process."""
    model_name: str | None = None
    """Model to ask the server for; None: its first."""
    api_key: str | None = None
    """API key for the server; QUIRE_API_KEY and OPENAI_API_KEY work too."""
    quick: str | None = None
    """Send this one text, print the answer and leave."""
    max_tokens: int = 1024
    """Longest answer in tokens."""
    temperature: float | None = None
    """Sampling temperature; None: the model's own default."""
    top_p: float | None = None
    """Nucleus sampling; None: the model's own default."""
    stats: bool = True
    """Show tokens, time to the first one and tokens a second after each answer, on stderr."""


class Talker(Protocol):
    name: str
    num_tokens: int  # of the last answer

    def stream(self, prompt: str | list[Message]) -> Iterator[str]:
        """The answer's pieces as they come; a list is a chat, a string is continued."""
        ...

    def close(self) -> None: ...


def open_talker(talk: TalkConfig, config: EngineConfig) -> Talker:
    return Remote(talk) if talk.url else Local(talk, config)


def show(talker: Talker, prompt: str | list[Message], talk: TalkConfig) -> str:
    """Print the answer while it comes; returns it."""
    started, first, pieces = time.perf_counter(), 0.0, []
    try:
        for piece in talker.stream(prompt):
            first = first or time.perf_counter() - started
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    with contextlib.suppress(KeyboardInterrupt):  # too late to stop anything
        print()
        if talk.stats and talker.num_tokens:
            print(_statistics(talker.num_tokens, first, time.perf_counter() - started), file=sys.stderr, flush=True)
    return "".join(pieces)


def _statistics(num_tokens: int, first: float, seconds: float) -> str:
    """first: seconds to the first token, of `seconds` in all."""
    decoding = seconds - first
    rate = (num_tokens - 1) / decoding if num_tokens > 1 and decoding > 0 else 0.0
    return f"  [{num_tokens} tokens, first after {first * 1000:.0f} ms, then {rate:.1f} tokens/s]"


class Local:
    """An engine in this process, driven between the user's lines."""

    def __init__(self, talk: TalkConfig, config: EngineConfig) -> None:
        from quire.frontend.async_engine import AsyncLLM

        self.talk = talk
        self.num_tokens = 0
        self.name = config.model.model or "the demo model"
        self._runner = asyncio.Runner()
        self._engine = self._runner.run(AsyncLLM.start(config))
        self._count = 0

    def stream(self, prompt: str | list[Message]) -> Iterator[str]:
        """Ctrl-C raises KeyboardInterrupt here, at a point where the engine can go on."""
        loop = self._runner.get_loop()
        source = self._generate(self._render(prompt))
        interrupted = asyncio.Event()
        loop.add_signal_handler(signal.SIGINT, interrupted.set)  # raised anywhere, it would kill what reads the engine
        try:
            while (piece := loop.run_until_complete(_next_or_none(source, interrupted))) is not None:
                yield piece
            if interrupted.is_set():
                raise KeyboardInterrupt
        finally:
            loop.run_until_complete(source.aclose())  # an interrupted answer is aborted
            loop.remove_signal_handler(signal.SIGINT)

    def close(self) -> None:
        self._engine.shutdown()
        self._runner.close()

    def _render(self, prompt: str | list[Message]) -> list[int]:
        tokenizer = self._engine.get_tokenizer()
        if tokenizer is None:
            raise InputError("to talk one needs a tokenizer: leave skip_tokenizer_init out", "skip_tokenizer_init")
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, True)
        from quire.frontend.templates.chat import render

        return tokenizer.encode(render(prompt, template=self._engine.chat_template), False)

    async def _generate(self, ids: list[int]) -> AsyncGenerator[str, None]:
        defaults = self._engine.info.resolved.info.generation_defaults
        asked = {"temperature": self.talk.temperature, "top_p": self.talk.top_p}
        chosen = defaults | {name: value for name, value in asked.items() if value is not None}
        room = self._engine.info.max_model_len - len(ids)
        params = SamplingParams(
            **chosen | {"max_tokens": max(min(self.talk.max_tokens, room), 1)}, output_kind=RequestOutputKind.DELTA
        )
        self.num_tokens = 0
        self._count += 1
        async for output in self._engine.generate({"prompt_token_ids": ids}, params, f"talk-{self._count}"):
            self.num_tokens += len(output.outputs[0].token_ids)
            if output.outputs[0].text:
                yield output.outputs[0].text


async def _next_or_none(source: AsyncGenerator[str, None], interrupted: asyncio.Event) -> str | None:
    """None at the end, or once interrupted."""
    coming = asyncio.ensure_future(anext(source, None))
    interruption = asyncio.create_task(interrupted.wait())
    await asyncio.wait((coming, interruption), return_when=asyncio.FIRST_COMPLETED)
    interruption.cancel()
    if interrupted.is_set():
        coming.cancel()
        await asyncio.wait((coming,))
        return None
    return coming.result()


class Remote:
    """A server that speaks OpenAI's API."""

    def __init__(self, talk: TalkConfig) -> None:
        assert talk.url is not None
        url = urllib.parse.urlsplit(talk.url if "//" in talk.url else f"http://{talk.url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise InputError(f"url must look like http://localhost:8000/v1, got {talk.url!r}", "url")
        self.talk = talk
        self.num_tokens = 0
        self._url = url
        self._path = url.path.rstrip("/") or "/v1"
        key = talk.api_key or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.name = talk.model_name or json.loads(self._send("GET", "/models").read())["data"][0]["id"]

    def stream(self, prompt: str | list[Message]) -> Iterator[str]:
        body: dict[str, Any] = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": self.talk.max_tokens, "temperature": self.talk.temperature, "top_p": self.talk.top_p}
        path = "/completions" if isinstance(prompt, str) else "/chat/completions"
        body |= {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        self.num_tokens = 0
        response = self._send("POST", path, body)
        try:
            for event in read_events(response):
                if event.get("usage"):
                    self.num_tokens = event["usage"]["completion_tokens"]
                for choice in event.get("choices", []):
                    yield choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        finally:
            response.close()

    def close(self) -> None:
        pass

    def _send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        host, port = self._url.hostname or "", self._url.port
        connection: http.client.HTTPConnection
        if self._url.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, context=ssl.create_default_context())
        else:
            connection = http.client.HTTPConnection(host, port)
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
        except OSError as error:
            raise InputError(f"no server answers at {self._url.geturl()}: {error}", "url") from None
        if response.status != 200:
            raise InputError(f"the server answered {response.status}: {_message(response.read())}", "url")
        return response


def read_events(lines: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream. Raises InputError for one that is an error."""
    for line in lines:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if not data:
            continue
        event = json.loads(data)
        if "error" in event:
            raise InputError(f"the server gave up: {event['error'].get('message')}", "url")
        yield event


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
