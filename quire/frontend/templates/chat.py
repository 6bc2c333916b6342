"""Messages → prompt text, through the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from quire.foundation.errors import ConfigError, ContextLengthError, InputError
from quire.foundation.shown import shown
from quire.frontend.templates.message_forms import MessageForms
from quire.frontend.templates.template import Template
from quire.frontend.text import check_text

Message = Mapping[str, Any]
_CONTINUE_MARK = "\ue000quire-continues-here\ue000 "  # private-use characters; the space shows whether it was trimmed
_RESERVED = ("messages", "tools", "add_generation_prompt")
TEXTS = MessageForms()

compiled = lru_cache(maxsize=16)(Template)


class CallArguments(dict[str, Any]):
    """Of an earlier call: an object to templates that look into it, JSON text to those that write it (DeepSeek's).

    The text is the client's own, which is the model's: so it renders as it was generated.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + self._text


class ToolList(list[Any]):
    """Tools as a message's own: a list to templates that loop over it (GLM 4's), JSON text of the functions to those
    that write it (Phi 4 mini's)."""

    def __radd__(self, other: object) -> str:
        return str(other) + json.dumps([tool["function"] for tool in self], ensure_ascii=False)


class ChatTemplate:
    """The chat templates of a model by name ("default", perhaps "tool_use"), and the special tokens they may write.

    They are compiled when they are needed: a model whose template is broken still answers plain completions.
    """

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.special_tokens = dict(special_tokens or {})

    def pick(self, *, with_tools: bool) -> Template:
        """Raises InputError if there is no template named "default", or if it is not valid Jinja."""
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise InputError(f"the model has no default chat template, only: {', '.join(self.sources)}", "messages")
        try:
            return compiled(self.sources[name])
        except ConfigError as error:
            raise InputError(str(error), "chat_template") from None


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: ChatTemplate | str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    max_chars: int | None = None,
) -> str:
    """The prompt of a conversation; encode it with `add_special_tokens=False`, for templates write BOS themselves.

    `template` is the model's (`Tokenizer.template`) or Jinja source; `kwargs` are further template variables. With
    `continue_final_message` the prompt ends inside the last message, so that the model goes on writing it. `max_chars`:
    of the messages together, and of the prompt.
    Raises InputError naming the message and field that cannot be rendered.
    """
    if template is None:
        raise InputError(
            "this model has no chat template: give one with chat_template, or use plain completions", "messages"
        )
    if continue_final_message and add_generation_prompt:
        raise InputError(
            "continue_final_message and add_generation_prompt exclude each other: the prompt ends either inside the "
            "last message or at the start of a new one",
            "continue_final_message",
        )
    template = ChatTemplate(template) if isinstance(template, str) else template
    chosen = template.pick(with_tools=bool(tools))
    chat = normalize(messages, chosen.forms)
    if max_chars is not None and (size := sum(map(_num_chars, chat))) > max_chars:
        raise ContextLengthError.of_chars(size, max_chars)
    if "developer" not in chosen.source:
        for message in chat:
            if message["role"] == "developer":
                message["role"] = "system"  # which the template knows
    if tools and chosen.forms.tools and not any(message.get("tools") for message in chat):
        if chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": "" if chosen.forms.text else []})
        chat[0]["tools"] = ToolList(tools)
    if continue_final_message:
        _mark_end(chat[-1], len(chat) - 1)
    taken = [name for name in kwargs or {} if name in _RESERVED]
    if taken:
        raise InputError(
            f"chat_template_kwargs must not hold {shown(taken[0])}, which is set already", "chat_template_kwargs"
        )
    text = chosen.render(
        {
            "documents": None,
            **template.special_tokens,
            **(kwargs or {}),
            "messages": chat,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        },
        max_chars,
    )
    return _cut_at_mark(text) if continue_final_message else text


def _num_chars(message: Mapping[str, Any]) -> int:
    """Of a message's content and reasoning."""
    return sum(len(part["text"]) for part in _parts(message["content"])) + len(message.get("reasoning") or "")


def _parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def continued_text(messages: Sequence[Message]) -> str:
    """The text of a last message of the assistant's, for an answer that goes on with it."""
    content = messages[-1].get("content")
    return content if messages[-1].get("role") == "assistant" and isinstance(content, str) else ""


def normalize(messages: Sequence[Message], forms: MessageForms = TEXTS) -> list[dict[str, Any]]:
    """Checked copies of the messages: contents as the template takes them, tool arguments parsed."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InputError(f"messages must be a list of messages, got {type(messages).__name__}", "messages")
    if not messages:
        raise InputError("messages must hold at least one message", "messages")
    return [_message(message, f"messages[{i}]", forms) for i, message in enumerate(messages)]


def _message(message: Message, where: str, forms: MessageForms) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be an object with role and content, got {type(message).__name__}", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"{where}.role must be a non-empty string, got {shown(role)}", f"{where}.role")
    result = {**message, "content": _content(message, role, where, forms)}
    has_text = any(part["text"] for part in _parts(result["content"]))
    if role == "assistant" and (reasoning := _reasoning(message, where)):
        result["reasoning"] = result["reasoning_content"] = reasoning  # templates know one or the other,
        if not (has_text and message.get("tool_calls")):
            result["thinking"] = reasoning  # or this one (gpt-oss), whose template refuses it beside content and calls
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
        if forms.null and not has_text:
            result["content"] = None
    elif "tool_calls" in message:
        del result["tool_calls"]  # templates ask whether the key is there
    return result


def _reasoning(message: Message, where: str) -> str:
    """The reasoning of an earlier answer: a field under either name, or parts of the content."""
    for name in ("reasoning", "reasoning_content"):
        text = message.get(name)
        if text is not None and not isinstance(text, str):
            raise InputError(f"{where}.{name} must be a string, got {type(text).__name__}", f"{where}.{name}")
        if text:
            check_text(text, f"{where}.{name}")
            return text
    content = message.get("content")
    parts = [part for part in content if _is_thought(part)] if isinstance(content, list) else []
    thoughts = []
    for part in parts:
        text = part.get("thinking")
        if not isinstance(text, str):
            raise InputError(f"{where}.content: a part of type 'thinking' needs a text, thinking", f"{where}.content")
        check_text(text, f"{where}.content")
        thoughts.append(text)
    return "\n".join(thoughts)


def _is_thought(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "thinking"


def _content(message: Message, role: str, where: str, forms: MessageForms) -> str | list[dict[str, Any]]:
    content = message.get("content")
    where = f"{where}.content"
    if content is None:
        if role != "assistant":
            raise InputError(f"{where} is required for the role {shown(role)}", where)
        content = ""
    if isinstance(content, str):
        check_text(content, where)
        return content if forms.text else _parts(content)
    if not isinstance(content, list):
        raise InputError(f"{where} must be a string or a list of text parts, got {type(content).__name__}", where)
    is_answer = role == "assistant"
    parts = [
        _text_part(part, f"{where}[{i}]") for i, part in enumerate(content) if not (is_answer and _is_thought(part))
    ]
    return parts if forms.parts else "\n".join(part["text"] for part in parts)


def _text_part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise InputError(f"{where} must be an object, got {type(part).__name__}", where)
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise InputError(f"{where}.type must be 'text', got {shown(kind)}: this model takes text only", f"{where}.type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InputError(f"{where}.text must be a string, got {type(text).__name__}", f"{where}.text")
    check_text(text, f"{where}.text")
    return {"type": "text", "text": text}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Copies whose arguments are objects: clients send JSON text, templates iterate over names and values."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InputError(f"{where} must be a list of objects", where)
    results = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(f"{where}[{i}].function must be an object with a name", f"{where}[{i}].function")
        arguments = _arguments(function.get("arguments"), f"{where}[{i}].function.arguments")
        results.append({**call, "function": {**function, "arguments": arguments}})
    return results


def _arguments(arguments: Any, where: str) -> CallArguments:
    text = arguments if isinstance(arguments, str) else None
    if text is not None:
        try:
            arguments = json.loads(text) if text.strip() else None
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"{where} is not valid JSON: {error}", where) from None
    if arguments is None:
        return CallArguments({}, "{}")
    if not isinstance(arguments, Mapping):
        raise InputError(f"{where} must be a JSON object, got {type(arguments).__name__}", where)
    return CallArguments(arguments, json.dumps(arguments, ensure_ascii=False) if text is None else text)


def _mark_end(message: dict[str, Any], index: int) -> None:
    """Put the mark behind the text that is to be continued."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK
    elif content:
        content[-1]["text"] += _CONTINUE_MARK
    else:
        raise InputError(f"messages[{index}] has no text to continue", f"messages[{index}].content")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_MARK.rstrip())
    if at < 0:
        raise InputError(
            "continue_final_message: the chat template does not render the last message's content",
            "continue_final_message",
        )
    is_kept = text.startswith(_CONTINUE_MARK, at)
    return text[:at] if is_kept else text[:at].rstrip()  # the template trims contents: so would it have done here
