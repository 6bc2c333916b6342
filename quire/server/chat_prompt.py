"""From the messages of a request to the text that the model's template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quire.foundation.errors import InputError
from quire.frontend.chat import render
from quire.frontend.template_sandbox import Rendering
from quire.server.body import on_thread
from quire.server.errors import ApiError
from quire.server.params import field_names
from quire.server.pooling_protocol import InputBody
from quire.server.protocol import ChatFields, TokenizeBody
from quire.server.service import Service

# Longer conversations are rendered on a thread, so that other streams go on.
BIG_CHAT = 64  # messages
BIG_TEXT = 256 * 1024  # characters
CHARS_A_TOKEN = 16  # a text of more fits into no context
MIN_CHARS = 1024 * 1024
MAX_WAITING = 64  # renderings of templates that requests bring; a hostile one takes a second

Messages = Sequence[Mapping[str, Any]]


async def render_chat(
    service: Service,
    body: ChatFields | TokenizeBody | InputBody,
    template_kwargs: Mapping[str, Any],
    *,
    messages: Messages,
) -> str:
    """Raises InputError for messages that are malformed, that the template refuses, or for a template of their own.

    ApiError 503 if too many of the latter wait.
    """
    tools, generate = None, body.add_generation_prompt
    if not isinstance(body, InputBody):
        are_hidden = body.tool_choice == "none" and service.serve.exclude_tools_when_tool_choice_none
        tools = None if are_hidden else body.tools
    generate = not body.continue_final_message if generate is None else generate
    if body.chat_template is not None:
        given = Rendering(
            source=body.chat_template,
            special_tokens=_trusted(service),
            messages=messages,
            tools=tools,
            add_generation_prompt=generate,
            continue_final_message=body.continue_final_message,
            kwargs=template_kwargs,
            max_chars=max(MIN_CHARS, CHARS_A_TOKEN * service.running().info.max_model_len),
        )
        if service.templates.num_waiting >= MAX_WAITING:
            raise ApiError(503, f"{MAX_WAITING} requests with templates of their own wait to be rendered")
        with field_names({"kwargs": "chat_template_kwargs"}):
            return await service.templates.render(given)
    template = service.running().chat_template
    call = partial(render, messages, tools, template, generate, body.continue_final_message, template_kwargs)
    with field_names({"kwargs": "chat_template_kwargs"}):
        return await on_thread(call) if _is_big(messages) else call()


def _trusted(service: Service) -> Mapping[str, str]:
    """The special tokens that a request's own template may write. Raises InputError if it may have none."""
    if not service.serve.trust_request_chat_template:
        raise InputError(
            "chat_template is taken from requests only if the server runs with trust_request_chat_template",
            "chat_template",
        )
    return service.tokenizer().special_tokens


def _is_big(messages: Messages) -> bool:
    if len(messages) > BIG_CHAT:
        return True
    texts = (message.get("content") for message in messages if isinstance(message, Mapping))
    return sum(len(text) for text in texts if isinstance(text, str)) > BIG_TEXT
