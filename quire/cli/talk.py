"""A model to talk to from a terminal: an engine in this process, or a server behind a URL."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from quire.cli.http_client import Server, read_events
from quire.cli.view import View
from quire.config.engine import EngineConfig
from quire.foundation.errors import InputError
from quire.types.sampling import RequestOutputKind, SamplingParams

Message = dict[str, Any]
MOST_TOKENS = 1024  # of an answer, unless somebody says


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
    max_tokens: int | None = None
    """Longest answer in tokens; None: 1024, or what the context has room for; chats on a server: the latter."""
    temperature: float | None = None
    """Sampling temperature; None: the model's own default."""
    top_p: float | None = None
    """Nucleus sampling; None: the model's own default."""
    markdown: bool = True
    """In a terminal, show answers as they are meant and not as they are written."""
    stats: bool = True
    """Show tokens, time to the first one and tokens a second after each answer, on stderr."""


class Thought(str):
    """A piece of an answer's reasoning."""


class Talker(Protocol):
    name: str
    num_tokens: int  # of the last answer
    tool_calls: list[dict[str, Any]]  # of the last answer
    settings: dict[str, Any]  # sampling parameters and other fields of requests; what is None is not sent

    def stream(self, prompt: str | list[Message]) -> Iterator[str]:
        """The answer's pieces as they come; a list is a chat, a string is continued."""
        ...

    def close(self) -> None: ...


def open_talker(talk: TalkConfig, config: EngineConfig) -> Talker:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text: refused where the line is sent
    return Remote(talk, config.model.model) if talk.url else Local(talk, config)


def show(talker: Talker, prompt: str | list[Message], talk: TalkConfig) -> str:
    """Print the answer while it comes; returns it, its reasoning left out."""
    started, first, pieces = time.perf_counter(), 0.0, []
    view = View(talk.markdown and not isinstance(prompt, str))
    try:
        for piece in talker.stream(prompt):
            first = first or time.perf_counter() - started
            if isinstance(piece, Thought):
                view.think(piece)
            else:
                pieces.append(piece)
                view.add(piece)
    except KeyboardInterrupt:
        view.add(" …")
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # too late to stop anything
            view.close()
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

        self.settings = settings_of(talk)
        self.num_tokens = 0
        self.tool_calls: list[dict[str, Any]] = []
        self.name = config.model.model or "the demo model"
        self._runner = asyncio.Runner()
        self._engine = self._runner.run(AsyncLLM.start(config))
        self._count = 0

    def stream(self, prompt: str | list[Message]) -> Iterator[str]:
        """Ctrl-C raises KeyboardInterrupt here, at a point where the engine can go on."""
        self.num_tokens = 0
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
        given = {name: value for name, value in self.settings.items() if value is not None}
        chosen = {"max_tokens": MOST_TOKENS} | defaults | given
        room = self._engine.info.max_model_len - len(ids)
        if unknown := sorted(chosen.keys() - SamplingParams.__struct_fields__):
            raise InputError(f"{unknown[0]} is no sampling parameter", unknown[0])
        params = SamplingParams(**chosen, output_kind=RequestOutputKind.DELTA)
        params = msgspec.structs.replace(params, max_tokens=max(min(params.max_tokens or room, room), 1))
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


def settings_of(talk: TalkConfig) -> dict[str, Any]:
    return {"temperature": talk.temperature, "top_p": talk.top_p, "max_tokens": talk.max_tokens}


class Remote:
    """A server that speaks OpenAI's API."""

    def __init__(self, talk: TalkConfig, model: str) -> None:
        """model: the command's first argument, which `model_name` says too."""
        assert talk.url is not None
        self.settings = settings_of(talk)
        self.num_tokens = 0
        self.tool_calls: list[dict[str, Any]] = []
        self._server = Server(talk.url, talk.api_key)
        self.name = talk.model_name or model or self._server.first_model()

    def stream(self, prompt: str | list[Message]) -> Iterator[str]:
        body: dict[str, Any] = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}}
        body |= {name: value for name, value in self.settings.items() if value is not None}
        path = "/completions" if isinstance(prompt, str) else "/chat/completions"
        if isinstance(prompt, str):  # by OpenAI's rules it would be 16 tokens; of a chat it is what the context holds
            body.setdefault("max_tokens", MOST_TOKENS)
        body |= {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        self.num_tokens, self.tool_calls = 0, []
        response = self._server.send("POST", self._server.api + path, body)
        try:
            for event in read_events(response):
                if event.get("usage"):
                    self.num_tokens = event["usage"]["completion_tokens"]
                for choice in event.get("choices", []):
                    delta = choice.get("delta", {})
                    if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                        yield Thought(thought)
                    for call in delta.get("tool_calls") or ():
                        self._take_call(call)
                    yield choice["text"] if "text" in choice else delta.get("content") or ""
        finally:
            response.close()

    def close(self) -> None:
        pass

    def _take_call(self, part: dict[str, Any]) -> None:
        """Calls come in parts: name and id first, then the arguments bit by bit."""
        while len(self.tool_calls) <= part["index"]:
            self.tool_calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = self.tool_calls[part["index"]], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""
