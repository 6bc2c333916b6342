"""From the messages of a request to the text that the model's template makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quire.foundation.errors import InputError
from quire.frontend.chat import ChatTemplate, render
from quire.server.params import field_names
from quire.server.protocol import ChatFields, TokenizeBody
from quire.server.service import Service

BIG_CHAT = 64  # messages; longer conversations are rendered on a thread, so that other streams go on


async def render_chat(
    service: Service,
    body: ChatFields | TokenizeBody,
    template_kwargs: Mapping[str, Any],
    *,
    messages: Sequence[Mapping[str, Any]],
) -> str:
    """Raises InputError for messages that are malformed, that the template refuses, or for a template of their own."""
    engine = service.running()
    template = engine.chat_template
    if body.chat_template is not None:
        if not service.serve.trust_request_chat_template:
            raise InputError(
                "chat_template is taken from requests only if the server runs with trust_request_chat_template",
                "chat_template",
            )
        template = ChatTemplate(body.chat_template, service.tokenizer().special_tokens)
    are_hidden = body.tool_choice == "none" and service.serve.exclude_tools_when_tool_choice_none
    generate = body.add_generation_prompt
    call = partial(
        render,
        messages,
        template=template,
        tools=None if are_hidden else body.tools,
        add_generation_prompt=not body.continue_final_message if generate is None else generate,
        continue_final_message=body.continue_final_message,
        kwargs=template_kwargs,
    )
    with field_names({"kwargs": "chat_template_kwargs"}):
        is_big = len(messages) > BIG_CHAT or body.chat_template is not None
        return await asyncio.to_thread(call) if is_big else call()
