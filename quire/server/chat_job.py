"""From the request of another API to the chat request that it means, and to the job that answers it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from pydantic import ValidationError

from quire.foundation.errors import InputError
from quire.frontend.parsers.formats import Formats
from quire.frontend.replies import ReplyPlan, ReplyWish
from quire.server import generation
from quire.server.chat_prompt import render_chat
from quire.server.conversation import count_turns, shortened
from quire.server.errors import explain_validation
from quire.server.generation import Generation, Prompt
from quire.server.params import field_names, sampling_params
from quire.server.protocol import ChatBody
from quire.server.service import Service


def chat_body(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatBody:
    """names: what the client calls the fields. Raises InputError naming the client's field."""
    with field_names(names):
        try:
            return ChatBody.model_validate({key: value for key, value in fields.items() if value is not None})
        except ValidationError as error:
            raise InputError(*explain_validation(error)) from None


async def begin(
    request: Request, body: ChatBody, model: str, names: Mapping[str, str], *, job_id: str, shorten: bool = False
) -> tuple[Generation, ReplyPlan]:
    """shorten: leave out the oldest turns of a conversation that the context does not hold.

    Raises InputError naming the client's field.
    """
    service: Service = request.app.state.service
    defaults = service.running().info.resolved.info.generation_defaults
    asked = body.max_completion_tokens
    with field_names(names):
        params = sampling_params(
            body,
            defaults,
            max_tokens=defaults.get("max_tokens") if asked is None else asked,
            logprobs=body.top_logprobs if body.logprobs else None,
            prompt_logprobs=None,
        )
        prompt = await _prompt(service, body)
        if shorten:
            prompt = await _shortened(service, body, prompt, params.max_tokens or 1)
        plan = ReplyPlan(Formats(), ReplyWish(), prompt.text or "", body.chat_template_kwargs)
        job = generation.start(request, body, model, [prompt], plan.params(params), job_id)
    job.id = job_id
    job.names = dict(names)
    return job, plan


async def count_tokens(service: Service, body: ChatBody, names: Mapping[str, str]) -> int:
    """Tokens of the prompt that the request has."""
    with field_names(names):
        return len((await _prompt(service, body)).token_ids)


async def _shortened(service: Service, body: ChatBody, whole: Prompt, num_answer: int) -> Prompt:
    """The prompt with as many of the latest turns as leave room for an answer; all of it if the last alone does not."""
    room = max(1, service.running().info.max_model_len - num_answer)
    if len(whole.token_ids) <= room:
        return whole
    best, low, high = whole, 1, count_turns(body.messages) - 1
    while low <= high:
        middle = (low + high) // 2
        shorter = body.model_copy(update={"messages": shortened(body.messages, middle)})
        prompt = await _prompt(service, shorter)
        if len(prompt.token_ids) <= room:
            best, high = prompt, middle - 1
        else:
            low = middle + 1
    return best


async def _prompt(service: Service, body: ChatBody) -> Prompt:
    text = await render_chat(service, body, body.chat_template_kwargs)
    return Prompt(await generation.tokenize(service, text, add_special_tokens=body.add_special_tokens), text)
