"""The common middle of all pooling endpoints: prompts in, vectors out."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from quire.foundation.errors import InputError
from quire.foundation.shown import clipped
from quire.frontend.pooling import requests as pooling
from quire.frontend.pooling.requests import PoolingPrompt, RefusedError, pooler_of
from quire.frontend.templates.chat import Message
from quire.frontend.tokenization.truncation import Truncation
from quire.server.generate.chat_prompt import render_chat
from quire.server.generate.generation import REFUSALS, STARTED_A_TURN
from quire.server.generate.params import field_names
from quire.server.http.body import look_into
from quire.server.http.entry import IN_BACKGROUND, hand_over, retry_seconds
from quire.server.http.errors import ApiError
from quire.server.http.long_body import Prepared, sent
from quire.server.http.rank import rank_of
from quire.server.http.trail import trail_of
from quire.server.pooling.protocol import EmbeddingBody, InputBody, PoolBody, PoolingBase
from quire.server.service import Service
from quire.types.output import ABORTED
from quire.types.pooling import EMBED, PoolingOutput, PoolingParams, PoolingRequestOutput
from quire.types.request import BACKGROUND, TokenIds

MAX_INPUTS = 2048  # of one request
sent(PoolingPrompt)
Output = PoolingRequestOutput[PoolingOutput]


@dataclass(slots=True)
class PoolingJob:
    """One HTTP request being answered."""

    request: Request
    service: Service
    id: str
    model: str
    params: PoolingParams
    task: str
    priority: int
    engine_id: str
    core: int | None  # that is to answer; None: whichever
    field: str = "input"  # where the client put its texts
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    num_prompt_tokens: int = 0
    adapter: str = ""  # that vectors of this kind are made with; "": the model's, if it is one

    async def run(self, prompts: Sequence[PoolingPrompt]) -> list[Output]:
        """The outputs in the order of the prompts. Being cancelled aborts them.

        Raises InputError if a prompt cannot run, ApiError if the engine gave up on one.
        """
        engine, metrics, progress = self.service.running(), self.service.metrics, self.service.progress
        info, adapter = engine.info, await engine.adapter_of(self.service.adapter_of(self.adapter or self.model))
        with field_names({"prompt": self.field}):
            requests = []
            for i, prompt in enumerate(prompts):
                name = f"{self.engine_id}-{i}"
                options: dict[str, Any] = {"request_id": name, "priority": self.priority, "adapter": adapter}
                requests.append(pooling.build(prompt, self.params, self.task, info, **options, core=self.core))
                if i % STARTED_A_TURN == 0:
                    await asyncio.sleep(0)
        self.num_prompt_tokens += sum(len(prompt.token_ids) for prompt in prompts)
        trail = trail_of(self.request.scope)
        trail.reply_id, trail.model, trail.prompt_tokens = self.id, self.model, self.num_prompt_tokens
        trail.engine_ids += [request.id for request in requests]
        hand_over(self.request, len(requests))
        progress.wait()
        try:
            request_states = await engine.run(requests)
        except BaseException as error:
            if metrics is not None:
                metrics.end("error" if isinstance(error, Exception) else ABORTED, count=len(requests))
            raise
        finally:
            progress.done()
        progress.seen()
        try:
            outputs = [pooling.output(request_state, self.task, self.params, info) for request_state in request_states]
        except RefusedError as error:
            status = REFUSALS.get(error.reason, 500)
            if metrics is not None:
                metrics.end("error", count=len(requests))
                if error.reason in REFUSALS:
                    metrics.refuse(error.reason)
            raise ApiError(status, str(error), retry_after=retry_seconds(self.service)) from None
        if metrics is not None:
            for request_state in request_states:
                metrics.pooled(request_state.num_prompt_tokens, request_state.metrics)
        return outputs

    def usage(self) -> dict[str, Any]:
        tokens = self.num_prompt_tokens
        return {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }

    def shared(self) -> dict[str, Any]:
        """The fields that a reply begins with."""
        return {"id": self.id, "object": "list", "created": self.created, "model": self.model}


def start(
    request: Request,
    body: PoolingBase,
    id_prefix: str,
    *,
    task: str | None = None,
    dimensions: int | None = None,
) -> PoolingJob:
    """Raises InputError for a model that does not pool (or not so) and for options that cannot be."""
    service: Service = request.app.state.service
    info = service.running().info
    model = service.check_model(body.model)
    if body.priority and service.config.schedule.scheduling_policy != "priority":
        raise InputError("priority needs a server with scheduling_policy=priority", "priority")
    params = PoolingParams(task=task, dimensions=dimensions, use_activation=body.use_activation)
    reply_id = (
        f"{id_prefix}-{body.request_id or request.headers.get('x-request-id', '')[:256] or secrets.token_hex(12)}"
    )
    return PoolingJob(
        request=request,
        service=service,
        id=reply_id,
        model=model,
        params=params,
        task=pooling.check_task(params, info),
        priority=BACKGROUND if request.scope.get(IN_BACKGROUND) else body.priority,
        engine_id=f"{reply_id}-{secrets.token_hex(4)}",
        core=rank_of(request, info),
    )


def choose_purpose(job: PoolingJob, body: EmbeddingBody) -> None:
    """What vectors are for, as Jina's embedders and others know it: the name of an adapter, of words before a text, or
    of both. Raises InputError for one that the model does not know."""
    name, service = body.task, job.service
    if name is None or name == EMBED:
        return
    pooler = pooler_of(service.running().info)
    prompts, adapter = dict(pooler.prompts), service.adapter_of(name)
    if adapter is None and name not in prompts:
        known = ", ".join(sorted({EMBED, *prompts, *service.all_names} - {*service.names}))
        raise InputError(
            f"task={clipped(name, 128)!r}: there is neither an adapter nor a prompt of that name; there are: {known}",
            "task",
        )
    if prompts.get(name) and not pooler.include_prompt:
        raise InputError(
            f"task={name!r} is not supported: this model's vectors leave the words before a text out", "task"
        )
    if adapter is not None and job.model not in (*service.names, name):
        raise InputError(f"task={name!r} and model={job.model!r} are two adapters", "task")
    job.adapter = name if adapter is not None else ""


# -- what stands in a body ---------------------------------------------------------------------------------------


async def prompts_of(request: Request, body: InputBody) -> list[PoolingPrompt]:
    """The prompts of a body. Raises InputError naming the field that cannot be."""
    if isinstance(body.input, Prepared):
        return body.input.take()  # type: ignore[no-any-return]
    service: Service = request.app.state.service
    cut = Truncation.of(body.truncate_prompt_tokens, body.truncation_side, service.running().info)
    chats = _conversations(body)
    if chats is None:
        given: list[Any] = await look_into(request, lambda: parse_input(body.input))
    else:
        given = []
        for chat in chats:
            given.append(await render_chat(service, body, body.chat_template_kwargs, messages=chat))
            await asyncio.sleep(0)  # each may take its time
    words = _words_before(service, body) if chats is None else ""
    texts = [words + item for item in given if isinstance(item, str)]
    special = chats is None if body.add_special_tokens is None else body.add_special_tokens
    field = "input" if body.messages is None else "messages"
    encoded = iter(await encode(service, texts, cut, field, add_special_tokens=special) if texts else ())
    ids = [next(encoded) if isinstance(item, str) else cut.cut(item) for item in given]
    return [PoolingPrompt(one, None, body.cache_salt) for one in ids]


def _words_before(service: Service, body: InputBody) -> str:
    """What texts begin with that are for a purpose."""
    if not isinstance(body, EmbeddingBody) or isinstance(body, PoolBody) or body.task is None:
        return ""
    return dict(pooler_of(service.running().info).prompts).get(body.task, "")


def given(body: InputBody) -> Sequence[Any]:
    """The inputs, a text in the place of each conversation. Raises InputError."""
    chats = _conversations(body)
    return parse_input(body.input) if chats is None else [""] * len(chats)


async def encode(
    service: Service, texts: Sequence[str], cut: Truncation, field: str, *, add_special_tokens: bool = True
) -> list[TokenIds]:
    """Token ids of texts. Raises InputError if the server has no tokenizer, or for what the context cannot hold."""
    most = service.running().info.max_model_len
    with field_names({"prompt": field}):
        return await service.encoder.encode(texts, cut, add_special_tokens=add_special_tokens, most=most)


def parse_input(value: Any) -> list[str] | list[list[int]]:
    """One input or many, as text or token ids. Raises InputError naming what is wrong."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise InputError(
            "input must be a string or a non-empty list: of strings, of token ids, or of lists of token ids", "input"
        )
    if type(value[0]) is int:
        value = [value]
    if len(value) > MAX_INPUTS:
        raise InputError(f"input may hold at most {MAX_INPUTS} items, got {len(value)}", "input")
    if all(isinstance(item, str) for item in value):
        return list(value)
    for index, item in enumerate(value):
        if not isinstance(item, list) or not item or not all(type(token) is int for token in item):
            raise InputError(f"input[{index}] must be a non-empty list of token ids, as the others are", "input")
    return list(value)


def _conversations(body: InputBody) -> list[list[Message]] | None:
    """The conversations of a body, None if it holds none: one or many, as `messages` or as `input`."""
    given = body.messages if body.messages is not None else body.input
    if body.messages is None and not _are_messages(given):
        return None
    assert given is not None
    chats = [given] if isinstance(given[0], dict) else given
    if len(chats) > MAX_INPUTS:
        raise InputError(f"at most {MAX_INPUTS} conversations may be sent at once, got {len(chats)}", "messages")
    for chat in chats:
        if not _are_messages(chat) or not isinstance(chat[0], dict):
            raise InputError("messages must be a list of messages, or a list of such lists", "messages")
    return chats


def _are_messages(given: Any) -> bool:
    while isinstance(given, list) and given and isinstance(given[0], list):
        given = given[0]
    return isinstance(given, list) and bool(given) and isinstance(given[0], dict)
