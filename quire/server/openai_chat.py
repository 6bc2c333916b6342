"""POST /v1/chat/completions: messages in, the assistant's next message out. …/batch: several conversations at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.foundation.errors import InputError
from quire.frontend.replies import ReplyPlan, ReplyWish
from quire.frontend.structured import grammar_of
from quire.frontend.tools import read_tool_choice, read_tools
from quire.server import generation
from quire.server.body import openapi_body, read_body
from quire.server.chat_prompt import render_chat
from quire.server.chat_reply import ROLE, ChatReply
from quire.server.generation import Prompt
from quire.server.params import field_names, sampling_params
from quire.server.protocol import ChatBatchBody, ChatBody, ChatFields
from quire.server.service import Service
from quire.server.sse import EventStream, JsonReply
from quire.types.reply import NamedTool
from quire.types.sampling import SamplingParams

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=openapi_body(ChatBody))
async def chat_completions(request: Request) -> Response:
    body = await read_body(request, ChatBody)
    return await _answer(request, body, [body.messages])


@router.post("/v1/chat/completions/batch", openapi_extra=openapi_body(ChatBatchBody))
async def chat_batch(request: Request) -> Response:
    body = await read_body(request, ChatBatchBody)
    return await _answer(request, body, body.messages)


async def _answer(request: Request, body: ChatFields, conversations: Sequence[list[dict[str, Any]]]) -> Response:
    """One choice a conversation (and each of `n`), in order."""
    service: Service = request.app.state.service
    model = service.check_model(body.model)
    names = _names(body)
    with field_names(names):
        params = _params(service, body)
        wish = _wish(service, body, params)
        kwargs = _template_kwargs(service, body)
        prompts, plans = [], []
        for messages in conversations:
            prompt, plan = await _plan(service, body, messages, wish, kwargs)
            prompts.append(prompt)
            plans.append(plan)
    job = generation.start(request, body, model, prompts, plans[0].params(params), "chatcmpl")
    job.names = names
    reply = ChatReply(job, body, plans, _last_message(conversations[0]) if body.echo else "")
    headers = generation.reply_headers(request, job)
    if body.stream:
        return EventStream(service.in_flight, job.num_answers, reply.frames, headers)
    return JsonReply(service.in_flight, job.num_answers, reply.whole, headers)


async def _plan(
    service: Service, body: ChatFields, messages: list[dict[str, Any]], wish: ReplyWish, kwargs: Mapping[str, Any]
) -> tuple[Prompt, ReplyPlan]:
    """The prompt of one conversation, and what its answers are made of."""
    engine = service.running()
    text = await render_chat(service, body, kwargs, messages=messages)
    continued = _last_message(messages) if body.continue_final_message else None
    plan = ReplyPlan(engine.formats, wish, text, kwargs, continued=continued)
    ids = await generation.tokenize(service, text, add_special_tokens=body.add_special_tokens)
    return Prompt(generation.truncated(ids, body, engine.info.max_model_len), text, plan.constraint), plan


def _wish(service: Service, body: ChatFields, params: SamplingParams) -> ReplyWish:
    tools = read_tools(body.tools or [])
    choice = read_tool_choice(body.tool_choice, tools)
    if choice == "auto" and not service.serve.enable_auto_tool_choice:
        choice = "none"
    structured = params.structured_outputs
    is_text = (body.response_format or {}).get("type", "text") == "text"
    if structured is not None and is_text and isinstance(choice, NamedTool):
        raise InputError("structured_outputs cannot bind an answer that tool_choice makes a call", "structured_outputs")
    budget = body.max_thinking_tokens if body.thinking_token_budget is None else body.thinking_token_budget
    return ReplyWish(
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        include_reasoning=body.include_reasoning,
        max_thinking_tokens=None if budget == -1 else budget,
        grammar=None if structured is None else grammar_of(structured),
        close_at_limit=structured is not None and structured.close_at_limit,
    )


def _params(service: Service, body: ChatFields) -> SamplingParams:
    defaults = service.running().info.resolved.info.generation_defaults
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return sampling_params(
        body,
        defaults,
        max_tokens=defaults.get("max_tokens") if asked is None else asked,
        logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def _names(body: ChatFields) -> dict[str, str]:
    """What the client calls the fields of SamplingParams and ReplyWish."""
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.thinking_token_budget is not None:
        names["max_thinking_tokens"] = "thinking_token_budget"
    if body.response_format is not None:
        names["structured_outputs"] = "response_format"
    return names


def _template_kwargs(service: Service, body: ChatFields) -> dict[str, Any]:
    """The request's own come before what its fields mean, and those before the server's."""
    kwargs = dict(service.config.replies.default_chat_template_kwargs)
    if body.documents is not None:
        kwargs["documents"] = body.documents
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
        kwargs["enable_thinking"] = body.reasoning_effort != "none"
    return kwargs | body.chat_template_kwargs


def _last_message(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of a last message of the assistant's."""
    content = messages[-1].get("content")
    return content if messages[-1].get("role") == ROLE and isinstance(content, str) else ""
