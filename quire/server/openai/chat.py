"""POST /v1/chat/completions: messages in, the assistant's next message out. …/batch: several conversations at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.foundation.errors import InputError
from quire.frontend.templates.chat import continued_text
from quire.server.generate import beam_search, generation
from quire.server.generate.chat_job import ChatJob, ReadChat, conversations_of
from quire.server.generate.protocol import ChatBatchBody, ChatBody, ChatFields
from quire.server.http.body import openapi_body, read_body
from quire.server.http.limits import MAX_PROMPTS
from quire.server.http.sse import EventStream, JsonReply
from quire.server.openai.chat_reply import ChatReply
from quire.server.service import Service

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=openapi_body(ChatBody))
async def chat_completions(request: Request) -> Response:
    body = await read_body(request, ChatBody)
    return await _answer(request, body)


@router.post("/v1/chat/completions/batch", openapi_extra=openapi_body(ChatBatchBody))
async def chat_batch(request: Request) -> Response:
    body = await read_body(request, ChatBatchBody)
    return await _answer(request, body)


def check_count(conversations: Sequence[Any]) -> None:
    """Raises InputError for too many."""
    if len(conversations) > MAX_PROMPTS:
        raise InputError(f"messages may hold at most {MAX_PROMPTS} conversations, got {len(conversations)}", "messages")


async def _answer(request: Request, body: ChatFields) -> Response:
    """One choice a conversation (and each of `n`), in order."""
    service: Service = request.app.state.service
    model = service.check_model(body.model)
    chat = await ChatJob.read(request, body)
    prompts, plans = [], []
    conversations = conversations_of(body)
    check_count(conversations)
    for messages in conversations:
        await asyncio.sleep(0)  # each may take its time
        prompt, plan = await chat.plan(messages)
        prompts.append(prompt)
        plans.append(plan)
    start = beam_search.start if body.use_beam_search else generation.start
    job = start(request, body, model, prompts, plans[0].params(chat.params), "chatcmpl")
    job.names = {**job.names, **chat.names}
    if len(plans) == 1:
        job.trail.answers_with(plans[0])
    reply = ChatReply(job, body, plans, _continued(conversations[0]) if body.echo else "")
    if body.stream:
        return EventStream(service.in_flight, job.num_answers, reply.frames)
    return JsonReply(service.in_flight, job.num_answers, reply.whole)


def _continued(messages: list[dict[str, Any]] | ReadChat) -> str:
    return messages.continued if isinstance(messages, ReadChat) else continued_text(messages)
