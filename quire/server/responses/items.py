"""The items of a response while they are written: each opens, grows and closes, and every step is an event."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.server.generate.sealed import seal
from quire.server.http.sse import event

Event = dict[str, Any]
Drain = Callable[[], list[dict[str, Any]]]  # log-probabilities of the content since the last time


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


class Item(ABC):
    """`item` is what the reply holds; it is complete when the item is closed."""

    def __init__(self, index: int, item: dict[str, Any]) -> None:
        self.index = index
        self.item = {**item, "status": "in_progress"}
        self._where = {"item_id": item["id"], "output_index": index}

    def open(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.item}

    @abstractmethod
    def grow(self, text: str) -> Iterator[Event]: ...

    def close(self, status: str) -> Iterator[Event]:
        """status: "completed" or "incomplete"."""
        self.item["status"] = status
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.item}


class Text(Item):
    """One part of text inside an item."""

    kind = ""

    def __init__(self, index: int, item: dict[str, Any], part: dict[str, Any]) -> None:
        super().__init__(index, {**item, "content": []})
        self._part = {"type": self.kind, "text": "", **part}
        self._texts: list[str] = []
        self._where = {**self._where, "content_index": 0}

    def open(self) -> Iterator[Event]:
        yield from super().open()
        yield {"type": "response.content_part.added", **self._where, "part": self._part}

    def grow(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        yield {"type": f"response.{self.kind}.delta", **self._where, "delta": text, **self._extra()}

    def add(self, text: str) -> None:
        """`grow` for those who write the event themselves."""
        self._texts.append(text)

    def close(self, status: str) -> Iterator[Event]:
        text = "".join(self._texts)
        extra = self._last_extra()
        self._part = {**self._part, "text": text, **extra}
        yield {"type": f"response.{self.kind}.done", **self._where, "text": text, **extra}
        yield {"type": "response.content_part.done", **self._where, "part": self._part}
        self.item["content"] = [self._part]
        yield from super().close(status)

    def _extra(self) -> dict[str, Any]:
        return {}

    def _last_extra(self) -> dict[str, Any]:
        return {}


class Message(Text):
    kind = "output_text"

    def __init__(self, index: int, logprobs: Drain | None) -> None:
        item = {"id": new_id("msg"), "type": "message", "role": "assistant"}
        super().__init__(index, item, {"annotations": [], "logprobs": []})
        like = event({"type": "response.output_text.delta", **self._where, "logprobs": [], "delta": ""})
        self.before_delta = like.removesuffix(b'""}\n\n')  # of events without log-probabilities
        self._drain = logprobs
        self._logprobs: list[dict[str, Any]] = []

    def _extra(self) -> dict[str, Any]:
        fresh = self._drain() if self._drain is not None else []
        self._logprobs += fresh
        return {"logprobs": fresh}

    def _last_extra(self) -> dict[str, Any]:
        self._extra()
        return {"logprobs": self._logprobs}


class ReasoningItem(Text):
    kind = "reasoning_text"

    def __init__(self, index: int, *, sealed: bool) -> None:
        """sealed: say it a second time as `encrypted_content`, for clients that give only this back."""
        super().__init__(index, {"id": new_id("rs"), "type": "reasoning", "summary": []}, {})
        self._sealed = sealed

    def close(self, status: str) -> Iterator[Event]:
        if self._sealed:
            self.item["encrypted_content"] = seal("".join(self._texts))
        yield from super().close(status)


@dataclass(frozen=True, slots=True)
class CallName:
    """What the client calls a function that the model knows under one flat name."""

    name: str
    namespace: str | None = None
    is_custom: bool = False  # takes text instead of JSON

    @property
    def fields(self) -> dict[str, str]:
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}


class FunctionCall(Item):
    def __init__(self, index: int, call_id: str, name: CallName) -> None:
        item = {"id": new_id("fc"), "type": "function_call", "call_id": call_id, **name.fields, "arguments": ""}
        super().__init__(index, item)
        self._texts: list[str] = []

    def grow(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        yield {"type": "response.function_call_arguments.delta", **self._where, "delta": text}

    def close(self, status: str) -> Iterator[Event]:
        self.item["arguments"] = arguments = "".join(self._texts)
        done = {"name": self.item["name"], "arguments": arguments}
        yield {"type": "response.function_call_arguments.done", **self._where, **done}
        yield from super().close(status)


class CustomCall(Item):
    """The call of a custom tool. To the model it is a function of one string, so its text is known at the end."""

    def __init__(self, index: int, call_id: str, name: CallName) -> None:
        item = {"id": new_id("ctc"), "type": "custom_tool_call", "call_id": call_id, **name.fields, "input": ""}
        super().__init__(index, item)
        self._texts: list[str] = []

    def grow(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        return iter(())

    def close(self, status: str) -> Iterator[Event]:
        self.item["input"] = text = custom_input("".join(self._texts))
        yield {"type": "response.custom_tool_call_input.delta", **self._where, "delta": text}
        yield {"type": "response.custom_tool_call_input.done", **self._where, "input": text}
        yield from super().close(status)


CUSTOM_PARAMETER = "input"


def custom_input(arguments: str) -> str:
    """The text in the arguments of a custom tool's call; the arguments themselves if they are not what was asked."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(CUSTOM_PARAMETER) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
