"""From a chat request, whichever API it came in, to the job that answers it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from pydantic import ValidationError

from quire.foundation.errors import ContextLengthError, InputError
from quire.frontend.replies import ReplyPlan, ReplyWish
from quire.frontend.structured import grammar_of
from quire.frontend.templates.chat import continued_text
from quire.frontend.tools import read_tool_choice, read_tools
from quire.server.generate import generation
from quire.server.generate.chat_prompt import render_chat, template_kwargs
from quire.server.generate.conversation import count_turns, shortened
from quire.server.generate.generation import Generation, PromptIds
from quire.server.generate.params import NAMES, field_names, sampling_params
from quire.server.generate.protocol import ChatBatchBody, ChatBody, ChatFields
from quire.server.http.body import look_into
from quire.server.http.errors import explain_validation
from quire.server.http.long_body import Prepared, sent
from quire.server.http.trail import trail_of
from quire.server.service import Service
from quire.types.reply import NamedTool
from quire.types.sampling import SamplingParams

Messages = Sequence[Mapping[str, Any]]


@sent
@dataclass(frozen=True, slots=True)
class ReadChat:
    """A conversation, rendered and encoded. continued: the last text, if the answer goes on with it."""

    prompt: PromptIds
    continued: str


class ChatJob:
    """What one chat request asks, checked: how to sample, what its answers are made of, how to render its messages.

    Raises InputError naming the field.
    """

    @classmethod
    async def read(cls, request: Request, body: ChatFields) -> ChatJob:
        return await look_into(request, lambda: cls(request, body))

    def __init__(self, request: Request, body: ChatFields) -> None:
        self.request = request
        self.service: Service = request.app.state.service
        self.body = body
        self.engine = self.service.running()
        self.names = _names(body)
        with field_names(self.names):
            self.params = self._params()
            self.wish = self._wish()
        self.template_kwargs = template_kwargs(self.service, self.body)

    async def plan(self, messages: Messages | ReadChat) -> tuple[PromptIds, ReplyPlan]:
        """The prompt of a conversation, and what its answers are made of."""
        began = time.time()
        chat = messages if isinstance(messages, ReadChat) else await self.read_chat(messages)
        trail_of(self.request.scope).encode(began)
        prompt, text = chat.prompt, chat.prompt.text
        assert text is not None
        continued = chat.continued if self.body.continue_final_message else None

        def make() -> tuple[PromptIds, ReplyPlan]:
            plan = ReplyPlan(self.engine.formats, self.wish, text, self.template_kwargs, continued=continued)
            return dataclasses.replace(prompt, constraint=plan.constraint), plan

        with field_names(self.names):
            return await look_into(self.request, make)

    async def read_chat(self, messages: Messages) -> ReadChat:
        prompt = await self._prompt(messages)
        return ReadChat(prompt, continued_text(messages) if self.body.continue_final_message or self.body.echo else "")

    async def _prompt(self, messages: Messages) -> PromptIds:
        """Of one that the context cannot hold it says so where the answer would begin: agents look for it there."""
        with field_names(self.names):
            cut = generation.truncation(self.service, self.body, self.params)
        special, text = self.body.add_special_tokens, ""
        try:
            text = await render_chat(self.service, self.body, self.template_kwargs, messages=messages)
            ids = await generation.tokenize(self.service, text, add_special_tokens=special, cut=cut)
        except ContextLengthError as error:
            return PromptIds([], text, refusal=error)
        return PromptIds(ids, text)

    async def count(self, messages: Messages | Prepared) -> int:
        """Tokens of the prompt, however many they are."""
        if isinstance(messages, Prepared):
            return int(messages.take())
        text = await render_chat(self.service, self.body, self.template_kwargs, messages=messages)
        return await self.service.encoder.count(text, add_special_tokens=self.body.add_special_tokens)

    async def fitting(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As many of the latest turns as leave room for an answer; all of them if even the last is too long."""
        room = max(1, self.engine.info.max_model_len - (self.params.max_tokens or 1))
        if await self._fits(messages, room):
            return messages
        best, low, high = messages, 1, count_turns(messages) - 1
        while low <= high:
            middle = (low + high) // 2
            shorter = shortened(messages, middle)
            if await self._fits(shorter, room):
                best, high = shorter, middle - 1
            else:
                low = middle + 1
        return best

    async def _fits(self, messages: Messages, room: int) -> bool:
        try:
            return await self.count(messages) <= room
        except ContextLengthError:
            return False

    def _params(self) -> SamplingParams:
        body, defaults = self.body, self.engine.info.resolved.info.generation_defaults
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return sampling_params(
            body,
            defaults,
            max_tokens=defaults.get("max_tokens") if asked is None else asked,
            logprobs=body.top_logprobs if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )

    def _wish(self) -> ReplyWish:
        body = self.body
        tools = read_tools(body.tools or [])
        choice = read_tool_choice(body.tool_choice, tools)
        if choice == "auto" and not self.service.serve.enable_auto_tool_choice:
            choice = "none"
        structured = self.params.structured_outputs
        is_text = (body.response_format or {}).get("type", "text") == "text"
        if structured is not None and is_text and isinstance(choice, NamedTool):
            raise InputError(
                "structured_outputs cannot bind an answer that tool_choice makes a call", "structured_outputs"
            )
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


def conversations_of(body: ChatFields) -> list[list[dict[str, Any]]] | list[ReadChat]:
    """Of a chat request, or of several at once. Raises InputError for one that was read elsewhere and cannot be."""
    messages: Any = body.messages if isinstance(body, ChatBody | ChatBatchBody) else []
    if isinstance(messages, Prepared):
        messages = messages.take()
    elif isinstance(body, ChatBody):
        messages = [messages]
    return messages  # type: ignore[no-any-return]


def chat_body(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatBody:
    """The chat request that a request of another API means; `names`: what its client calls the fields.

    Raises InputError naming the client's field.
    """
    with field_names(names):
        try:
            return ChatBody.model_validate({key: value for key, value in fields.items() if value is not None})
        except ValidationError as error:
            raise InputError(*explain_validation(error)) from None


async def start_chat(
    request: Request,
    body: ChatBody,
    model: str,
    names: Mapping[str, str],
    *,
    job_id: str,
    shorten: bool = False,
    clamp: bool = False,
) -> tuple[Generation, ReplyPlan]:
    """Of a request of another API: one answer. shorten: leave out the oldest turns if the context does not hold all.

    clamp: see `generation.start`. Raises InputError naming the client's field.
    """
    with field_names(names):
        chat = await ChatJob.read(request, body)
        [messages] = conversations_of(body)
        if shorten and not isinstance(messages, ReadChat):
            messages = await chat.fitting(messages)
        prompt, plan = await chat.plan(messages)
        job = generation.start(request, body, model, [prompt], plan.params(chat.params), job_id, clamp=clamp)
    job.id = job_id
    job.trail.answers_with(plan)
    job.names = {**chat.names, **names}
    return job, plan


async def count_tokens(request: Request, body: ChatBody, names: Mapping[str, str]) -> int:
    """Tokens of the prompt that the request has."""
    with field_names(names):
        chat = await ChatJob.read(request, body)
        return await chat.count(body.messages)


def _names(body: ChatFields) -> dict[str, str]:
    """What a client of chat calls the fields of SamplingParams and ReplyWish."""
    names = {**NAMES, "logprobs": "top_logprobs", "prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.thinking_token_budget is not None:
        names["max_thinking_tokens"] = "thinking_token_budget"
    if body.response_format is not None:
        names["structured_outputs"] = "response_format"
    return names
