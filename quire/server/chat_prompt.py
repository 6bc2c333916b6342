"""From chat messages to the text that the model's template makes of them."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from quire.foundation.errors import InputError
from quire.server.service import Service

BIG_CHAT = 64  # messages; longer conversations are rendered on a thread


async def render_chat(
    service: Service,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    template_kwargs: dict[str, Any],
) -> str:
    """Raises InputError for messages that are malformed or that the template refuses."""
    from quire.frontend.chat import render

    engine = service.running()
    arguments = (
        [clean_message(i, message) for i, message in enumerate(messages)],
        tools,
        engine.chat_template,
        (not continue_final_message) if add_generation_prompt is None else add_generation_prompt,
        continue_final_message,
        template_kwargs,
    )
    if len(messages) > BIG_CHAT:
        return await asyncio.to_thread(render, *arguments)
    return render(*arguments)


def clean_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: text content in one string, tool arguments as objects."""
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InputError(f"{where}.role must be a non-empty string, got {message.get('role')!r}", "messages")
    clean = {key: value for key, value in message.items() if value is not None}
    clean["content"] = _text(where, message.get("content"))
    if "reasoning" in clean:
        clean.setdefault("reasoning_content", clean["reasoning"])  # the name that templates know
    if "tool_calls" in clean:
        clean["tool_calls"] = _tool_calls(where, clean["tool_calls"])
    return clean


def _text(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where}.content must be a string or a list of parts", "messages")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise InputError(f"{where}.content[{i}] has type {kind!r}; this model takes text only", "messages")
        if not isinstance(part.get(kind), str):
            raise InputError(f"{where}.content[{i}].{kind} must be a string", "messages")
        texts.append(part[kind])
    return "\n".join(texts)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InputError(f"{where}.tool_calls must be a list", "messages")
    clean = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(f"{where}.tool_calls[{i}].function.name must be a string", "messages")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments)
            except orjson.JSONDecodeError:
                message = f"{where}.tool_calls[{i}].function.arguments must be a JSON object"
                raise InputError(message, "messages") from None
        if not isinstance(arguments, dict):
            raise InputError(f"{where}.tool_calls[{i}].function.arguments must be a JSON object", "messages")
        clean.append({**call, "function": {**function, "arguments": arguments}})
    return clean
