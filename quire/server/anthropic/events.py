"""Pieces of an answer → the events of POST /v1/messages, and the message that they add up to.

A reply that is not streamed is what the same events leave behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
from pydantic_core import from_json

from quire.server.generate.answer import AnswerStream, AnswerWriter
from quire.server.generate.sealed import seal, signature
from quire.server.http.errors import anthropic_error, explain
from quire.server.http.sse import event
from quire.types.reply import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning

Event = dict[str, Any]
PING = event({"type": "ping"})


class ContentBlock(ABC):
    """One content block: `block` is what the message holds, complete when it is closed."""

    def __init__(self, index: int, block: dict[str, Any]) -> None:
        self.index = index
        self.block = block
        self._texts: list[str] = []

    def open(self) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": self.index, "content_block": self.block}

    def grow(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        yield self._delta(text)

    def close(self) -> Iterator[Event]:
        yield {"type": "content_block_stop", "index": self.index}

    @abstractmethod
    def _delta(self, text: str) -> Event: ...

    @property
    def _text(self) -> str:
        return "".join(self._texts)


class TextBlock(ContentBlock):
    def __init__(self, index: int) -> None:
        super().__init__(index, {"type": "text", "text": ""})
        self.before_delta = event(self._delta("")).removesuffix(b'""}}\n\n')

    def add(self, text: str) -> None:
        """`grow` for those who write the event themselves."""
        self._texts.append(text)

    def close(self) -> Iterator[Event]:
        self.block["text"] = self._text
        yield from super().close()

    def _delta(self, text: str) -> Event:
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": "text_delta", "text": text}}


class ThinkingBlock(ContentBlock):
    def __init__(self, index: int, *, omitted: bool) -> None:
        """omitted: the text is not shown; the signature holds it for the next turn."""
        super().__init__(index, {"type": "thinking", "thinking": "", "signature": ""})
        self._omitted = omitted

    def grow(self, text: str) -> Iterator[Event]:
        if self._omitted:
            self._texts.append(text)
        else:
            yield from super().grow(text)

    def close(self) -> Iterator[Event]:
        text = self._text
        if not self._omitted:
            self.block["thinking"] = text
        self.block["signature"] = signed = seal(text) if self._omitted else signature(text)
        delta = {"type": "signature_delta", "signature": signed}
        yield {"type": "content_block_delta", "index": self.index, "delta": delta}
        yield from super().close()

    def _delta(self, text: str) -> Event:
        delta = {"type": "thinking_delta", "thinking": text}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}


class ToolUseBlock(ContentBlock):
    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index, {"type": "tool_use", "id": call_id, "name": name, "input": {}})

    def close(self) -> Iterator[Event]:
        self.block["input"] = _partial_object(self._text)
        yield from super().close()

    def _delta(self, text: str) -> Event:
        delta = {"type": "input_json_delta", "partial_json": text}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}


class MessageWriter(AnswerWriter):
    def __init__(
        self, answer: AnswerStream, message_id: str, model: str, max_tokens: int, *, omits_thinking: bool
    ) -> None:
        super().__init__(answer)
        self.reply = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {},
        }
        self._max_tokens = max_tokens
        self._omits_thinking = omits_thinking
        self._blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None

    def failed(self, error: Exception) -> bytes:
        """The last event of a message that cannot be finished."""
        status, text, _ = explain(error)
        return event({"type": "error", "error": anthropic_error(status, text)})

    def _begin(self) -> Iterable[Event]:
        self.reply["usage"] = self._usage(0)
        yield {"type": "message_start", "message": self.reply}
        yield {"type": "ping"}

    def _add(self, piece: Piece) -> Iterable[Event]:
        index = len(self._blocks)
        match piece:
            case Content(text):
                if not isinstance(self._open, TextBlock):
                    yield from self._replace(TextBlock(index))
                yield from self._grow(text)
            case Reasoning(text):
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._replace(ThinkingBlock(index, omitted=self._omits_thinking))
                yield from self._grow(text)
            case CallStart(_, call_id, name):
                yield from self._replace(ToolUseBlock(index, call_id, name))
            case CallArguments(_, text):
                yield from self._grow(text)
            case CallEnd():
                yield from self._close()

    def _end(self) -> Iterator[Event]:
        if not self._blocks:
            yield from self._replace(TextBlock(0))
        yield from self._close()
        reason, sequence = self._stop()
        usage = self._usage(len(self._answer.token_ids))
        content = [block.block for block in self._blocks]
        self.reply |= {"content": content, "stop_reason": reason, "stop_sequence": sequence, "usage": usage}
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def _stop(self) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        answer = self._answer
        if answer.finish_reason == "length":
            is_full = len(answer.token_ids) < self._max_tokens
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        if isinstance(answer.stop_reason, str):
            return "stop_sequence", answer.stop_reason
        calls = any(isinstance(block, ToolUseBlock) for block in self._blocks)
        return ("tool_use" if calls else "end_turn"), None

    def _replace(self, block: ContentBlock) -> Iterable[Event]:
        yield from self._close()
        self._open = block
        self._blocks.append(block)
        yield from block.open()

    def _grow(self, text: str) -> Iterable[Event]:
        return self._open.grow(text) if self._open is not None else ()

    def _close(self) -> Iterable[Event]:
        block, self._open = self._open, None
        return block.close() if block is not None else ()

    def _frame(self, item: Event) -> bytes:
        return event(item)

    def _more_text(self, text: str) -> bytes:
        block = self._open
        assert isinstance(block, TextBlock)
        block.add(text)
        return block.before_delta + orjson.dumps(text) + b"}}\n\n"

    def _usage(self, num_output: int) -> dict[str, int]:
        """Of the input, what was read from the prefix cache counts by itself."""
        answer = self._answer
        return {
            "input_tokens": answer.num_prompt - answer.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.num_cached,
            "output_tokens": num_output,
        }


def _partial_object(text: str) -> dict[str, Any]:
    """The JSON object that `text` is, or begins."""
    try:
        value = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
