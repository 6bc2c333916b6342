"""An engine that says what the test wants: the text behind the last SAY: of the prompt, and then it stops.

Its tokens are single characters. Reasoning is written in Qwen's way, calls in Hermes'.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from quire.foundation.errors import ContextLengthError
from quire.frontend.inputs import Prompt
from quire.frontend.reply_formats import Formats
from quire.parsers.base import REASONING_FORMATS, TOOL_FORMATS
from quire.types.output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.types.request import token_list
from quire.types.sampling import RequestOutputKind, SamplingParams
from tests.server.echo_llm import CONTEXT, EchoLLM

SAY = "SAY:"
TEMPLATE = (
    "{% if verbosity %}[{{ verbosity }}]{% endif %}"
    "{% if tools %}[tools]{% for tool in tools %} {{ tool.function.name }}{% endfor %}{{ '\n' }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "[call {{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
START, END = "<think>", "</think>"


class PlainSpelling:
    """Of a tokenizer whose tokens are characters."""

    def __init__(self) -> None:
        self.num_chars = 0

    def push(self, token: int) -> bytes:
        self.num_chars += 1
        return self.peek(token)

    def peek(self, token: int) -> bytes:
        return chr(token).encode()


class CharacterTokenizer:
    decoding = SimpleNamespace(spelling=lambda **_: PlainSpelling())
    eos_token_id = 0
    folder = Path("/nowhere")  # no text here is so long that a process encodes it

    def encode(self, text: str, _add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def least_tokens(self, num_chars: int) -> int:
        return num_chars

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:  # noqa: ARG002 (there are none)
        return "".join(map(chr, ids))

    def token_text(self, token: int) -> str:
        return chr(token)

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()


class DictatedLLM(EchoLLM):
    """`step`: characters a streamed output. `room`: tokens that the context leaves. `breaks_after`: outputs, then it
    fails. `prompts`: as the requests were rendered."""

    def __init__(self, context: int = CONTEXT, **options: Any) -> None:
        super().__init__(**options)
        report = msgspec.structs.replace(self.info.report, max_model_len=context)
        self.info = dataclasses.replace(self.info, report=report)
        self.context = context
        tools, reasoning = TOOL_FORMATS.get("hermes"), REASONING_FORMATS.get("qwen3")
        encode = CharacterTokenizer().encode
        self.reset()
        self._formats = Formats(tools, reasoning, start=tuple(encode(START)), end=tuple(encode(END)))

    def reset(self) -> None:
        self.step, self.delay, self.room = 1, 0.0, self.context
        self.template = TEMPLATE
        self.frozen, self.refuse_with = False, None
        self.breaks_after: int | None = None

    @property
    def prompts(self) -> list[str]:
        return [seen["prompt"].text for seen in self.seen]

    def get_tokenizer(self) -> Any:
        return CharacterTokenizer()

    @property
    def chat_template(self) -> str:
        return self.template

    @property
    def formats(self) -> Formats:
        return self._formats

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if len(prompt.token_ids) >= self.context:
            raise ContextLengthError.of(len(prompt.token_ids), 1, self.context)
        if self.refuse_with is not None:
            async for output in super().generate(prompt, params, request_id, **options):
                yield output
            return
        self.seen.append({"id": request_id, "params": params, "prompt": prompt, **options})
        self.running.add(request_id)
        text = str(prompt.text)
        said = text.rpartition(SAY)[2].partition("\n[")[0] if SAY in text else ""
        arrival, is_finished = time.time(), False
        try:
            limit = min(self.room, params.max_tokens or self.context)
            for i, (answer, is_finished) in enumerate(_answers(said, params, self.step, limit)):
                if i == self.breaks_after:
                    raise RuntimeError("a mistake in the engine")
                while self.frozen:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(self.delay)
                self.check_health()
                if is_finished or params.output_kind == RequestOutputKind.DELTA:
                    times = RequestMetrics(arrival, arrival, arrival, time.time() if is_finished else None)
                    yield RequestOutput(
                        request_id, text, token_list(prompt.token_ids), [answer], is_finished, None, 7, times
                    )
        finally:
            self.running.discard(request_id)
            if not is_finished:
                self.aborted.append(request_id)


def _answers(said: str, params: SamplingParams, step: int, limit: int) -> Iterator[tuple[CompletionOutput, bool]]:
    """The outputs, and whether each is the last; as a whole they are one."""
    reason: str | None = "stop"
    stop: str | None = None
    for candidate in params.stop:
        if candidate in said:
            said, stop = said.partition(candidate)[0], candidate
    if len(said) >= limit:
        said, reason, stop = said[:limit], "length", None
    size = step if params.output_kind == RequestOutputKind.DELTA else max(1, len(said))
    parts = [said[i : i + size] for i in range(0, len(said), size)] or [""]
    for i, part in enumerate(parts):
        is_last = i + 1 == len(parts)
        ids = [ord(character) for character in part]
        ends = is_last and reason == "stop" and stop is None
        if ends:
            ids.append(0)  # the token that ends an answer
        yield (
            CompletionOutput(
                0,
                part,
                ids,
                logprobs=None if params.logprobs is None else [_entries(token, params.logprobs) for token in ids],
                finish_reason=reason if is_last else None,
                stop_reason=stop if is_last else None,
            ),
            is_last,
        )


def _entries(token: int, count: int) -> dict[int, Logprob]:
    return {token + i: Logprob(-0.5 - i, i + 1, chr(token + i)) for i in range(max(1, count))}


def say(text: str) -> str:
    """A user's text that makes the engine answer `text`."""
    return SAY + text
