"""From the messages of a request to the text that the model's template makes of them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from quire.frontend.chat import render
from quire.server.params import field_names
from quire.server.protocol import ChatBody, TokenizeBody
from quire.server.service import Service

BIG_CHAT = 64  # messages; longer conversations are rendered on a thread, so that other streams go on


async def render_chat(service: Service, body: ChatBody | TokenizeBody, template_kwargs: dict[str, Any]) -> str:
    """Raises InputError for messages that are malformed or that the template refuses."""
    messages = body.messages or []
    generate = body.add_generation_prompt
    call = partial(
        render,
        messages,
        template=service.running().chat_template,
        tools=None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=not body.continue_final_message if generate is None else generate,
        continue_final_message=body.continue_final_message,
        kwargs=template_kwargs,
    )
    with field_names({"kwargs": "chat_template_kwargs"}):
        return await asyncio.to_thread(call) if len(messages) > BIG_CHAT else call()
