"""Turns of an agent → the messages that chat templates know. Responses and Messages both come through here.

Templates want one system message, first; turns that alternate; reasoning, text and calls of a turn in one message.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic_core import from_json

from quire.foundation.errors import ContextLengthError, InputError
from quire.frontend.templates.chat import ChatTemplate, render

Message = dict[str, Any]
MAX_CHARS = 64 * 1024 * 1024  # of a conversation


class Conversation:
    """`messages` are chat messages; `finish()` them when all turns were added.

    late_system: whether the template takes system messages after the first; else they become part of a user's turn.
    """

    def __init__(self, *, late_system: bool = True) -> None:
        self.messages: list[Message] = []
        self._late_system = late_system
        self._num_chars = 0
        self._names: dict[str, str] = {}  # of the functions that were called, by the call's id

    def system(self, text: str) -> None:
        if all(message["role"] == "system" for message in self.messages):
            self._say("system", text)
        elif self._late_system:
            self.messages.append({"role": "system", "content": [_part(text)]})
        else:
            self._say("user", f"<system-reminder>\n{text}\n</system-reminder>")

    def user(self, text: str) -> None:
        self._say("user", text)

    def assistant(self, text: str) -> None:
        """Text behind a call begins a message of its own: within one, templates write calls last."""
        last = self._last_assistant()
        if last is None or "tool_calls" in last:
            last = self._new_assistant()
        last["content"].append(_part(text))

    def reasoning(self, text: str) -> None:
        last = self._last_assistant()
        if last is None or last["content"] or "tool_calls" in last:
            last = self._new_assistant()
        self._count(text)
        last.setdefault("reasoning_content", []).append(text)

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any], where: str) -> None:
        """`arguments` may be the beginning of a JSON object: max_tokens cuts calls, and agents send them back.

        Raises InputError if they are anything else.
        """
        last = self._last_assistant() or self._new_assistant()
        function = {"name": name, "arguments": _object(arguments, where)}
        last.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._names[call_id] = name

    def result(self, call_id: str, text: str, where: str) -> None:
        """Raises InputError if nothing before called for this."""
        if call_id not in self._names:
            raise InputError(f"{where} names the call {call_id[:256]!r}, which no item before it makes", where)
        result = {"role": "tool", "tool_call_id": call_id, "name": self._names[call_id], "content": text}
        self.messages.append(result)

    def finish(self) -> list[Message]:
        """The messages, with text as plain strings where there is one part."""
        for message in self.messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n\n".join(message["reasoning_content"])
            content = message["content"]
            if isinstance(content, list) and len(content) < 2:
                message["content"] = content[0]["text"] if content else None
        return self.messages

    def _say(self, role: str, text: str) -> None:
        self._count(text)
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        self.messages[-1]["content"].append(_part(text))

    def _count(self, text: str) -> None:
        """Sealed texts are longer than what the client sent."""
        self._num_chars += len(text)
        if self._num_chars > MAX_CHARS:
            raise ContextLengthError.of_chars(self._num_chars, MAX_CHARS)

    def _last_assistant(self) -> Message | None:
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == "assistant" else None

    def _new_assistant(self) -> Message:
        self.messages.append({"role": "assistant", "content": []})
        return self.messages[-1]


def shortened(messages: list[Message], num_turns: int) -> list[Message]:
    """Without the `num_turns` oldest turns of the user, and what was answered to them; the system message stays."""
    start = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    turns = [i for i, message in enumerate(messages) if i >= start and message["role"] == "user"]
    return messages[:start] + messages[turns[num_turns] :] if 0 < num_turns < len(turns) else messages


def count_turns(messages: list[Message]) -> int:
    return sum(message["role"] == "user" for message in messages)


@lru_cache(maxsize=16)
def takes_late_system(template: ChatTemplate | str | None) -> bool:
    """Whether a template renders a system message that follows a user's. Found by asking it to."""
    turns = [{"role": role, "content": f"{role}{i}"} for i, role in enumerate(("user", "assistant", "system", "user"))]
    try:
        text = render(turns, template=template)
    except InputError:
        return False
    return all(turn["content"] in text for turn in turns)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _object(arguments: str | dict[str, Any], where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments, allow_partial=True) if arguments.strip() else {}
        except ValueError as error:
            raise InputError(f"{where} is not valid JSON: {error}", where) from None
    if not isinstance(arguments, dict):
        raise InputError(f"{where} must be a JSON object, got {type(arguments).__name__}", where)
    return arguments
