"""From the messages of a request to the text that the model's template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quire.foundation.aside import LONG, MANY
from quire.foundation.errors import InputError
from quire.frontend.templates.chat import render
from quire.frontend.templates.sandbox import Rendering
from quire.frontend.text import most_chars
from quire.server.generate.params import field_names
from quire.server.generate.protocol import ChatFields, TokenizeBody
from quire.server.http.body import on_thread
from quire.server.http.errors import ApiError
from quire.server.pooling.protocol import InputBody
from quire.server.service import Service

# Longer conversations are rendered on a thread, so that other streams go on.
BIG_TEXT = 16 * LONG  # characters, which a template mostly passes on
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
    most = most_chars(service.running().info.max_model_len)
    if body.chat_template is not None:
        given = Rendering(
            source=body.chat_template,
            special_tokens=_trusted(service),
            messages=messages,
            tools=tools,
            add_generation_prompt=generate,
            continue_final_message=body.continue_final_message,
            kwargs=template_kwargs,
            max_chars=most,
        )
        if service.templates.num_waiting >= MAX_WAITING:
            raise ApiError(503, f"{MAX_WAITING} requests with templates of their own wait to be rendered")
        with field_names({"kwargs": "chat_template_kwargs"}):
            return await service.templates.render(given)
    template = service.running().chat_template
    call = partial(render, messages, tools, template, generate, body.continue_final_message, template_kwargs, most)
    with field_names({"kwargs": "chat_template_kwargs"}):
        return await on_thread(call) if _is_big(messages, tools, template_kwargs) else call()


def template_kwargs(service: Service, body: ChatFields | TokenizeBody) -> dict[str, Any]:
    """The request's own come before what its fields mean, and those before the server's."""
    kwargs = dict(service.config.replies.default_chat_template_kwargs)
    if body.documents is not None:
        kwargs["documents"] = body.documents
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
        is_on = body.reasoning_effort != "none"
        kwargs["enable_thinking"] = kwargs["thinking"] = is_on  # templates know one or the other
    if body.verbosity is not None:
        kwargs["verbosity"] = body.verbosity
    return kwargs | body.chat_template_kwargs


def _trusted(service: Service) -> Mapping[str, str]:
    """The special tokens that a request's own template may write. Raises InputError if it may have none."""
    if not service.serve.trust_request_chat_template:
        raise InputError(
            "chat_template is taken from requests only if the server runs with trust_request_chat_template",
            "chat_template",
        )
    return service.tokenizer().special_tokens


def _is_big(*values: Any) -> bool:
    """Whether there is much of them. Looks at no more than it takes to tell."""
    pending, objects, chars = list(values), 0, 0
    while pending:
        value = pending.pop()
        objects += 1
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, Mapping | list):
            if len(value) > MANY:
                return True
            pending += value.values() if isinstance(value, Mapping) else value
        if objects > MANY or chars > BIG_TEXT:
            return True
    return False
