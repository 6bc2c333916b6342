"""The input of a response: items → messages, tools → functions that chat templates can show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from quire.foundation.errors import InputError
from quire.foundation.shown import shown
from quire.server.generate.conversation import Conversation
from quire.server.generate.sealed import unseal
from quire.server.responses.items import CUSTOM_PARAMETER, CallName, new_id

Item = dict[str, Any]

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
CALLABLE = ("function", "custom", "namespace")  # types of tools that the client runs
ROLES = ("user", "system", "developer", "assistant")
ID_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs", "compaction": "cmp"}
SUMMARY = "Summary of the conversation so far:\n"


@dataclass(slots=True)
class Tools:
    """The functions that the model may call, in chat's shape, and what the client calls them."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, CallName] = field(default_factory=dict)  # those that the client does not know by the flat name
    taken: set[str] = field(default_factory=set)  # names of functions
    hosted: list[str] = field(default_factory=list)  # types of tools that OpenAI would run; nothing here can

    def add(self, tools: Iterable[Any], where: str, namespace: str | None = None) -> None:
        """Raises InputError for what is not a tool."""
        for i, tool in enumerate(tools):
            self._add(tool, f"{where}[{i}]", namespace)

    def flat(self, name: str, namespace: str | None) -> str:
        """The one name under which the model knows a function."""
        if namespace is None:
            return name
        return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"

    def _add(self, tool: Any, where: str, namespace: str | None) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise InputError(f"{where} must be an object with a type", "tools")
        if kind not in CALLABLE:
            self.hosted.append(kind)
            return
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise InputError(f"{where}.name must be a non-empty string", "tools")
        if kind == "namespace":
            self.add(_list(tool, "tools", where, "tools"), f"{where}.tools", name)
            return
        flat = self.flat(name, namespace)
        if flat in self.taken:
            raise InputError(f"{where}.name {shown(flat)} is taken by another tool", "tools")
        self.taken.add(flat)
        if namespace is not None or kind == "custom":
            self.names[flat] = CallName(name, namespace, kind == "custom")
        function = _custom(tool) if kind == "custom" else _pick(tool, "description", "parameters", "strict")
        self.functions.append({"type": "function", "function": {"name": flat, **function}})


def choice(given: Any, tools: Tools) -> str | dict[str, Any]:
    """tool_choice in chat's shape. `tools` loses the functions that the choice does not allow.

    Raises InputError for what cannot be chosen.
    """
    if given in ("auto", "none", "required"):
        return str(given)
    kind = given.get("type") if isinstance(given, dict) else None
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _chosen(given, tools)}}
    if kind == "allowed_tools":
        mode, allowed = given.get("mode", "auto"), given.get("tools")
        if mode not in ("auto", "required") or not isinstance(allowed, list):
            raise InputError("tool_choice 'allowed_tools' needs a mode (auto, required) and tools", "tool_choice")
        names = {_chosen(tool, tools) for tool in allowed}
        tools.functions = [tool for tool in tools.functions if tool["function"]["name"] in names]
        return str(mode)
    raise InputError(
        "tool_choice must be auto, none, required, or an object of the type function, custom or allowed_tools, got "
        f"{shown(kind or given)}",
        "tool_choice",
    )


def with_ids(items: Iterable[Any]) -> list[Item]:
    """Copies of the items in full: with a type, an id, a status, and content as a list of parts.

    Raises InputError for what is not an item.
    """
    full = []
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise InputError(f"input[{i}] must be an object, got {type(item).__name__}", "input")
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if not isinstance(kind, str):
            raise InputError(f"input[{i}].type must be a string, got {type(kind).__name__}", "input")
        item = {**item, "type": kind}
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": part, "text": item["content"]}]
        if kind != "item_reference":
            given = item.get("id")
            item["id"] = given if isinstance(given, str) and given else new_id(ID_PREFIXES.get(kind, "msg"))
            item.setdefault("status", "completed")
        full.append(item)
    return full


def resolve(items: Iterable[Item], find: Callable[[str], Item | None]) -> list[Item]:
    """With what item_reference items refer to in their place. Raises InputError for ids that are not known."""
    found = []
    for i, item in enumerate(items):
        if item["type"] == "item_reference":
            known = find(str(item.get("id")))
            if known is None:
                raise InputError(f"input[{i}] refers to an item that is not stored: {shown(item.get('id'))}", "input")
            item = known
        found.append(item)
    return found


def add_items(conversation: Conversation, items: Iterable[Item], tools: Tools, name: str = "input") -> None:
    """Raises InputError naming the item that cannot be said to the model."""
    for i, item in enumerate(items):
        where = f"{name}[{i}]"
        match item["type"]:
            case "message":
                _add_message(conversation, item, where)
            case "reasoning":
                if text := _reasoning(item, where):
                    conversation.reasoning(text)
            case "function_call":
                function = tools.flat(_string(item, "name", where), _namespace(item, where))
                arguments = _string(item, "arguments", where)
                conversation.call(_string(item, "call_id", where), function, arguments, f"{where}.arguments")
            case "custom_tool_call":
                function = tools.flat(_string(item, "name", where), _namespace(item, where))
                arguments_ = {CUSTOM_PARAMETER: _string(item, "input", where)}
                conversation.call(_string(item, "call_id", where), function, arguments_, where)
            case "function_call_output" | "custom_tool_call_output":
                output = item.get("output")
                text = output if isinstance(output, str) else _text(output, f"{where}.output")
                conversation.result(_string(item, "call_id", where), text, where)
            case "compaction":
                conversation.user(SUMMARY + _summary(item, where))
            case "additional_tools":
                tools.add(_list(item, "tools", where, "input"), f"{where}.tools")
            case kind:
                raise InputError(f"{where}.type {shown(kind)} is not supported", "input")


def _add_message(conversation: Conversation, item: Item, where: str) -> None:
    role = item.get("role")
    text = _text(item.get("content"), f"{where}.content")
    if role == "user":
        conversation.user(text)
    elif role == "assistant":
        conversation.assistant(text)
    elif role in ("system", "developer"):
        conversation.system(text)
    else:
        raise InputError(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", "input")


def _text(parts: Any, where: str) -> str:
    if not isinstance(parts, list):
        raise InputError(f"{where} must be a string or a list of parts", "input")
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise InputError(f"{where}[{i}].type {shown(kind)} is not supported: this model takes text only", "input")
        texts.append(_string(part, TEXT_PARTS[kind], f"{where}[{i}]"))
    return "\n".join(texts)


def _reasoning(item: Item, where: str) -> str | None:
    """The text of a reasoning item; None if it is sealed by somebody else."""
    sealed = item.get("encrypted_content")
    for key in ("content", "summary"):
        parts = _list(item, key, where, "input")
        if texts := [_string(part, "text", f"{where}.{key}") for part in parts if isinstance(part, dict)]:
            return "\n".join(texts)
        if isinstance(sealed, str):
            return unseal(sealed)
    return None


def _summary(item: Item, where: str) -> str:
    text = unseal(_string(item, "encrypted_content", where))
    if text is None:
        raise InputError(f"{where} was sealed by another server, and only that can read it", "input")
    return text


def _string(item: Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InputError(f"{where}.{key} must be a string, got {type(value).__name__}", "input")
    return value


def _list(item: Item, key: str, where: str, param: str) -> list[Any]:
    """The list under `key`; empty if there is none."""
    value = item.get(key)
    if value is not None and not isinstance(value, list):
        raise InputError(f"{where}.{key} must be a list, got {type(value).__name__}", param)
    return value or []


def _namespace(item: Item, where: str) -> str | None:
    return None if item.get("namespace") is None else _string(item, "namespace", where)


def _chosen(given: Any, tools: Tools) -> str:
    name, namespace = (given.get(key) if isinstance(given, dict) else None for key in ("name", "namespace"))
    flat = tools.flat(str(name), None if namespace is None else str(namespace))
    if flat not in tools.taken:
        raise InputError(f"tool_choice names {flat[:80]!r}, which is not among the tools", "tool_choice")
    return flat


def _custom(tool: dict[str, Any]) -> dict[str, Any]:
    """A custom tool as a function of one string. A grammar for this string is shown to the model, not enforced."""
    form = tool.get("format")
    texts = [str(tool.get("description") or "")]
    if isinstance(form, dict) and form.get("type") == "grammar":
        texts.append(
            f"The {CUSTOM_PARAMETER} must follow this {form.get('syntax', 'lark')} grammar:\n{form.get('definition')}"
        )
    parameter = {"type": "string", "description": "The text that the tool takes."}
    return {
        "description": "\n\n".join(text for text in texts if text),
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_PARAMETER: parameter},
            "required": [CUSTOM_PARAMETER],
            "additionalProperties": False,
        },
    }


def _pick(tool: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: tool[key] for key in keys if tool.get(key) is not None}
