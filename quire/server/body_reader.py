"""The process in which long bodies are read (`http/long_body.py`): each in a fork, limited in time and memory.

There the app's own code checks a body, renders its conversations and encodes its texts, as it would in the front end:
`PREPARED` says what of each kind, and what of the body that stands for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from fastapi import Request
from pydantic import ValidationError

from quire.engine.client import EngineInfo
from quire.foundation.errors import InputError
from quire.foundation.fork_server import Limits
from quire.foundation.kept_bodies import BodyServer, read_greeting
from quire.foundation.value_pieces import pieces_of
from quire.foundation.wire import Decoder
from quire.frontend.reply_formats import Formats, find_formats
from quire.frontend.templates.chat import ChatTemplate
from quire.frontend.tokenization.encoder import WIDTH, TakesLongError, TextEncoder
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.server.anthropic import endpoints as anthropic
from quire.server.anthropic.body import CountTokensBody, MessagesBody
from quire.server.app import ROUTERS
from quire.server.generate.chat_job import ChatJob
from quire.server.generate.protocol import ChatBatchBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from quire.server.http.body import Body, kind_of, read, taken_apart
from quire.server.http.entry import priority_of
from quire.server.http.errors import ApiError, explain_validation
from quire.server.http.long_body import PRIORITY, Greeting, Prepared, Question, Refused, TakesLong
from quire.server.invocations import AnyBody
from quire.server.openai import chat, completions
from quire.server.pooling import job as pooling_job
from quire.server.pooling.protocol import InputBody
from quire.server.service import Service
from quire.server.tokens import generative_scoring, tokenization
from quire.server.tokens.protocol import GenerativeScoringBody, TokenGenerateBody
from quire.types.request import token_array

LIMITS = Limits(cpu_seconds=60, wall_seconds=600.0, memory_bytes=2 * 1024**3, forks=2 * WIDTH)
FEW_TEXTS = 256 * 1024  # characters that are encoded as a body is read; more are asked for once more
MAX_TEXTS = 4 * 1024 * 1024  # bytes of a body whose texts are all encoded in one fork: others wait for theirs
assert ROUTERS  # all kinds of bodies are known


# -- what bodies become ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Preparation:
    """make: from a body to what its endpoint makes of it, None if that is for the front end to do; `is_large` if it may
    have more texts than are encoded in one fork. names: the fields that this stands for, in the first of them."""

    make: Callable[[Request, Any, bool], Awaitable[Any]]
    names: tuple[str, ...]


async def _completion(request: Request, body: CompletionBody, is_large: bool) -> Any:
    if is_large and body.prompt is not None and _has_texts(completions.parse_prompts(body.prompt)):
        return None
    prompts, _ = await completions.read_completion(request, body)
    return [
        dataclasses.replace(
            prompt, token_ids=_array(prompt.token_ids), text=prompt.text if body.echo else None, constraint=None
        )
        for prompt in prompts
    ]


async def _chat(request: Request, body: ChatBody, _is_large: bool) -> Any:
    return None if body.chat_template else await _conversations(request, body, [body.messages])


async def _chat_batch(request: Request, body: ChatBatchBody, is_large: bool) -> Any:
    chat.check_count(body.messages)
    return None if body.chat_template or is_large else await _conversations(request, body, body.messages)


async def _conversations(request: Request, body: Any, conversations: list[list[dict[str, Any]]]) -> list[Any]:
    job = ChatJob(request, body)
    found = [await job.read_chat(messages) for messages in conversations]
    return [
        dataclasses.replace(one, prompt=dataclasses.replace(one.prompt, token_ids=_array(one.prompt.token_ids)))
        for one in found
    ]


async def _message(request: Request, body: CountTokensBody, _is_large: bool) -> Any:
    asked = anthropic.chat_request(request.app.state.service, body)
    if isinstance(body, MessagesBody):
        found = await _prepared(_conversations(request, asked, [asked.messages]))
    else:
        found = await _prepared(ChatJob(request, asked).count(asked.messages))
    return asked.model_copy(update={"messages": found})


async def _tokens(request: Request, body: TokenizeBody, _is_large: bool) -> Any:
    return None if body.chat_template else _bytes(await tokenization.tokenized(request, body))


async def _text(request: Request, body: DetokenizeBody, _is_large: bool) -> Any:
    return _bytes(tokenization.detokenized(request.app.state.service, body.tokens))


async def _inputs(request: Request, body: InputBody, is_large: bool) -> Any:
    if body.chat_template or (is_large and _has_texts(pooling_job.given(body))):
        return None
    prompts = await pooling_job.prompts_of(request, body)
    return [dataclasses.replace(prompt, token_ids=_array(prompt.token_ids)) for prompt in prompts]


async def _items(request: Request, body: GenerativeScoringBody, is_large: bool) -> Any:
    if is_large and _has_texts(body.items):
        return None
    prompts = await generative_scoring.prompts_of(request.app.state.service, body)
    return [dataclasses.replace(prompt, token_ids=_array(prompt.token_ids)) for prompt in prompts]


async def _ids(_request: Request, body: TokenGenerateBody, _is_large: bool) -> Any:
    return _array(body.token_ids)


PREPARED: dict[type[Body], Preparation] = {
    CompletionBody: Preparation(_completion, ("prompt", "prompt_embeds")),
    ChatBody: Preparation(_chat, ("messages",)),
    ChatBatchBody: Preparation(_chat_batch, ("messages",)),
    CountTokensBody: Preparation(_message, ("messages", "system", "tools")),
    TokenizeBody: Preparation(_tokens, ("prompt", "messages")),
    DetokenizeBody: Preparation(_text, ("tokens",)),
    InputBody: Preparation(_inputs, ("input", "messages")),
    GenerativeScoringBody: Preparation(_items, ("items", "query")),
    TokenGenerateBody: Preparation(_ids, ("token_ids",)),
}


def _has_texts(items: Sequence[Any]) -> bool:
    return any(isinstance(item, str) for item in items)


def _array(ids: Any) -> Any:
    """Ids that are no int32 are refused where they are used."""
    try:
        return token_array(ids)
    except ValueError:
        return ids


def _bytes(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


async def _prepared(made: Awaitable[Any]) -> Prepared | None:
    """What was made, or why it cannot be."""
    try:
        found = await made
    except (InputError, ApiError) as error:
        found = error
    return None if found is None else Prepared(found)


# -- one body ----------------------------------------------------------------------------------------------------


def answer(service: Service, question: Question, raw: bytearray) -> Any:
    """The body as it was read and prepared, or `Refused`; its bytes or priority, if these are asked for.

    `TakesLong` if that is to be asked for: what is refused does not wait for texts that are encoded.
    """
    if not question.kind:
        return np.frombuffer(raw, np.uint8)
    if question.kind == PRIORITY:
        return priority_of(raw)
    try:
        body = read(raw, kind_of(question.kind), question.path, question.most)
    except ValidationError as error:
        return Refused(InputError(*explain_validation(error)))
    except (InputError, ApiError) as error:
        return Refused(error)
    if isinstance(body, AnyBody):
        return AnyBody.model_construct(body.model_fields_set)
    how = next((PREPARED[kind] for kind in type(body).__mro__ if kind in PREPARED), None)
    if how is not None:
        if service.running().get_tokenizer() is not None:
            service.encoder.at_once = None if question.takes_long else FEW_TEXTS
        try:
            found = asyncio.run(_prepared(how.make(_request(service), body, len(raw) > MAX_TEXTS)))
        except TakesLongError:
            return TakesLong()
        if found is not None:
            return _with(body, how.names, found)
    return body


def _with(body: Body, names: tuple[str, ...], found: Prepared) -> Body:
    said = (body.model_fields_set - {*names}) | {names[0]}
    held = {name: value for name, value in body.__dict__.items() if name in said and name not in names}
    return type(body).model_construct(said, **held, **{names[0]: found})


def _request(service: Service) -> Request:
    """As endpoints take one; its body is read already."""
    app = SimpleNamespace(state=SimpleNamespace(service=service))
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": [], "app": app})
    request._body = b""
    return request


# -- the process -------------------------------------------------------------------------------------------------


class EngineStandIn:
    """What requests ask of an engine before it gets them."""

    errored = False
    outage = None

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self.info = info
        self.chat_template = template
        self.formats: Formats = find_formats(info.resolved, tokenizer)
        self._tokenizer = tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        return self._tokenizer


def service_of(greeting: Greeting) -> Service:
    tokenizer = None if greeting.folder is None else Tokenizer(Path(greeting.folder))
    template = None if greeting.template is None else ChatTemplate(*greeting.template)
    service = Service(greeting.info.resolved.config, greeting.serve)
    service.engine = EngineStandIn(greeting.info, tokenizer, template)  # type: ignore[assignment]
    if tokenizer is not None:
        service.use_encoder(TextEncoder(tokenizer, greeting.info.max_model_len, is_alone=True))
    return service


def main(descriptor: int) -> None:
    sock = socket.socket(fileno=descriptor)
    service = service_of(Decoder(Greeting).decode([read_greeting(sock)]))
    questions = msgspec.msgpack.Decoder(Question)

    def reply(asked: bytes, raw: bytearray) -> Iterator[bytes]:
        return pieces_of(answer(service, questions.decode(asked), raw), taken_apart)

    BodyServer(sock, reply, LIMITS, at_length=WIDTH).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
