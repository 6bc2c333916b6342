"""The turns of a Messages request: content blocks → messages, tools → functions that chat templates can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.foundation.errors import InputError
from quire.foundation.shown import shown
from quire.server.generate.conversation import Conversation
from quire.server.generate.sealed import unseal

Block = dict[str, Any]
Function = dict[str, Any]

# Claude Code's first block of system text. It differs from request to request, so nothing behind it would be cached.
BILLING_HEADER = "x-anthropic-billing-header"


def add_system(conversation: Conversation, system: str | Sequence[Block]) -> None:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    for i, block in enumerate(blocks):
        text = _text_of(block, f"system[{i}]")
        if text and not text.startswith(BILLING_HEADER):
            conversation.system(text)


def add_messages(conversation: Conversation, messages: Sequence[Block]) -> None:
    """Raises InputError naming the block that cannot be said to the model."""
    for i, message in enumerate(messages):
        where, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise InputError(f"{where}.content must be a string or a list of blocks", "messages")
        if role == "user":
            _add_user(conversation, blocks, where)
        elif role == "assistant":
            _add_assistant(conversation, blocks, where)
        elif role in ("system", "developer"):
            for j, block in enumerate(blocks):
                conversation.system(_text_of(block, f"{where}.content[{j}]"))
        else:
            raise InputError(f"{where}.role must be user, assistant or system, got {shown(role)}", "messages")
    if not conversation.messages:
        raise InputError("messages must hold a turn that says something", "messages")


def functions(tools: Sequence[Block], messages: Sequence[Block]) -> list[Function]:
    """The tools in chat's shape. Deferred ones count only if a message refers to them.

    Tools that Anthropic would run are left out, since nothing here can run them; raises InputError if all are such.
    """
    found: list[Function] = []
    hosted: list[str] = []
    named = _references(messages)
    for i, tool in enumerate(tools):
        kind, name, schema = tool.get("type", "custom"), tool.get("name"), tool.get("input_schema")
        if kind not in ("custom", None):
            hosted.append(str(kind))
            continue
        if not isinstance(name, str) or not name:
            raise InputError(f"tools[{i}].name must be a non-empty string", "tools")
        if not isinstance(schema, dict):
            raise InputError(f"tools[{i}].input_schema must be an object", "tools")
        if tool.get("defer_loading") and name not in named:
            continue
        function = {"name": name, "parameters": schema}
        function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        found.append({"type": "function", "function": function})
    if hosted and not found:
        raise InputError(
            f"tools of the type {hosted[0][:80]!r} are Anthropic's own; here a model can call tools with an "
            "input_schema, which the client runs",
            "tools",
        )
    return found


def _add_user(conversation: Conversation, blocks: Sequence[Block], where: str) -> None:
    """Results come first, as templates want them to follow the calls."""
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            here = f"{where}.content[{i}]"
            conversation.result(_string(block, "tool_use_id", here), _result(block, here), here)
    is_said = any(block.get("type") == "tool_result" for block in blocks)
    for i, block in enumerate(blocks):
        if block.get("type") != "tool_result" and (text := _text_of(block, f"{where}.content[{i}]")):
            conversation.user(text)
            is_said = True
    if not is_said:  # without this turn another one would be the last, and an assistant's would be continued
        raise InputError(f"{where}.content must not be empty: a user's turn says something", "messages")


def _add_assistant(conversation: Conversation, blocks: Sequence[Block], where: str) -> None:
    for i, block in enumerate(blocks):
        here = f"{where}.content[{i}]"
        match block.get("type"):
            case "thinking":
                text = _string(block, "thinking", here) or unseal(str(block.get("signature")))
                if text:
                    conversation.reasoning(text)
            case "redacted_thinking":
                if text := unseal(str(block.get("data"))):
                    conversation.reasoning(text)
            case "tool_use":
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    raise InputError(f"{here}.input must be an object", "messages")
                conversation.call(_string(block, "id", here), _string(block, "name", here), arguments, here)
            case _:
                if text := _text_of(block, here):
                    conversation.assistant(text)


def _result(block: Block, where: str) -> str:
    content = block.get("content") or ""
    if isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "\n".join(_text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    else:
        raise InputError(f"{where}.content must be a string or a list of blocks", "messages")
    return f"Error: {text}" if block.get("is_error") is True else text


def _text_of(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    match kind:
        case "text":
            return _string(block, "text", where)
        case "tool_reference":
            return _string(block, "tool_name", where)
        case "document":
            return _document(block, where)
        case "search_result":
            texts = [_text_of(part, f"{where}.content") for part in _list(block, "content", where)]
            return "\n".join([str(block.get("title", "")), str(block.get("source", "")), *texts])
    raise InputError(f"{where}.type {shown(kind)} is not text, and this model takes text only", "messages")


def _document(block: Block, where: str) -> str:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "text":
        text = _string(source, "data", f"{where}.source")
    elif source.get("type") == "content":
        parts = source.get("content")
        if not isinstance(parts, str):
            parts = "\n".join(_text_of(part, f"{where}.source") for part in _list(source, "content", where))
        text = parts
    else:
        raise InputError(f"{where} must be a document of plain text: this model takes text only", "messages")
    title = block.get("title")
    return f"{title}\n{text}" if title else text


def _references(value: Any) -> set[str]:
    """Names in tool_reference blocks, wherever they are."""
    if isinstance(value, list | tuple):
        return {name for item in value for name in _references(item)}
    if not isinstance(value, dict):
        return set()
    if value.get("type") == "tool_reference":
        return {str(value.get("tool_name"))}
    return _references(value.get("content"))


def _list(block: Block, key: str, where: str) -> list[Any]:
    """The list under `key`; empty if there is none."""
    value = block.get(key)
    if value is not None and not isinstance(value, list):
        raise InputError(f"{where}.{key} must be a list, got {type(value).__name__}", "messages")
    return value or []


def _string(block: Block, key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InputError(f"{where}.{key} must be a string, got {type(value).__name__}", "messages")
    return value
