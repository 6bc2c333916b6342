"""Pieces of an answer → the events of POST /v1/responses, and the response that they add up to.

A reply that is not streamed is what the same events leave behind.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import orjson

from quire.foundation.errors import ContextLengthError
from quire.server.generate.answer import AnswerStream, AnswerWriter
from quire.server.http.errors import explain
from quire.server.http.sse import event
from quire.server.responses.items import CallName, CustomCall, Event, FunctionCall, Item, Message, ReasoningItem
from quire.types import reply
from quire.types.reply import CallArguments, CallEnd, CallStart, Content, Piece

TOO_LONG = "context_length_exceeded"
ERROR_CODES = {400: "invalid_prompt", 503: "rate_limit_exceeded"}


class ResponseWriter(AnswerWriter):
    """Events with the whole response hold it as far as it is known then."""

    def __init__(
        self,
        answer: AnswerStream,
        response: dict[str, Any],
        names: Mapping[str, CallName],
        *,
        seals_reasoning: bool = False,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """names: what the client calls the functions whose names it does not know as the model does.

        on_end: called when `reply` is final, before the client is told.
        """
        super().__init__(answer)
        self.reply = response
        self._names = names
        self._seals = seals_reasoning
        self._on_end = on_end
        self._items: list[Item] = []
        self._open: Item | None = None
        self._next_number = 0

    @property
    def output(self) -> list[dict[str, Any]]:
        return [item.item for item in self._items]

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Like all streams, but a prompt that is too long is an event: so it is with OpenAI, and agents that read it
        there shorten the conversation, where a status would end their session."""
        try:
            async with aclosing(super().frames()) as frames:
                async for frame in frames:
                    yield frame
        except ContextLengthError as error:
            yield b"".join(map(self._frame, self._begin())) + self.failed(error)

    def failed(self, error: Exception) -> bytes:
        """The last event of a response that cannot be finished."""
        status, message, _ = explain(error)
        code = TOO_LONG if isinstance(error, ContextLengthError) else ERROR_CODES.get(status, "server_error")
        self.reply |= {
            "status": "failed",
            "error": {"code": code, "message": message},
            "output": self.output,
        }
        self._on_end()
        return self._frame(self._lifecycle("failed"))

    def queued(self) -> list[bytes]:
        """The first events of a response that is made in the background."""
        return [self._frame(self._lifecycle(name)) for name in ("created", "queued")]

    def cancelled(self) -> bytes:
        """The last event of a response that is wanted no more: what is there stays."""
        for _ in self._close("incomplete"):
            pass
        self.reply |= {"status": "cancelled", "output": self.output, "usage": usage_of(self._answer)}
        self._on_end()
        return self._frame(self._lifecycle("cancelled"))

    def _begin(self) -> Iterator[Event]:
        is_background = self._next_number > 0
        self.reply["status"] = "in_progress"
        if not is_background:
            yield self._lifecycle("created")
        yield self._lifecycle("in_progress")

    def _add(self, piece: Piece) -> Iterator[Event]:
        match piece:
            case Content(text):
                if not isinstance(self._open, Message):
                    yield from self._replace(Message(len(self._items), self._drain))
                yield from self._grow(text)
            case reply.Reasoning(text):
                if not isinstance(self._open, ReasoningItem):
                    yield from self._replace(ReasoningItem(len(self._items), sealed=self._seals))
                yield from self._grow(text)
            case CallStart(_, call_id, name):
                known = self._names.get(name) or CallName(name)
                kind = CustomCall if known.is_custom else FunctionCall
                yield from self._replace(kind(len(self._items), call_id, known))
            case CallArguments(_, text):
                yield from self._grow(text)
            case CallEnd():
                yield from self._close("completed", is_called=True)

    def _end(self) -> Iterator[Event]:
        answer = self._answer
        is_cut = answer.finish_reason == "length"
        if not is_cut and not any(isinstance(item, Message | FunctionCall | CustomCall) for item in self._items):
            yield from self._replace(Message(len(self._items), self._drain))
        yield from self._close("incomplete" if is_cut else "completed")
        self.reply |= {"output": self.output, "usage": usage_of(self._answer)}
        if is_cut:
            self.reply |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self.reply |= {"status": "completed", "completed_at": int(time.time())}
        self._on_end()
        yield self._lifecycle(self.reply["status"])

    def _replace(self, item: Item) -> Iterable[Event]:
        yield from self._close("completed")
        self._open = item
        self._items.append(item)
        yield from item.open()

    def _grow(self, text: str) -> Iterable[Event]:
        return self._open.grow(text) if self._open is not None else ()

    def _close(self, status: str, *, is_called: bool = False) -> Iterable[Event]:
        """is_called: the open item is a call, and it is whole."""
        item, self._open = self._open, None
        if item is None:
            return ()
        return item.close("incomplete" if isinstance(item, FunctionCall | CustomCall) and not is_called else status)

    def _drain(self) -> list[dict[str, Any]]:
        logprobs = self._answer.logprobs
        return logprobs.drain() if logprobs is not None else []

    def _lifecycle(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": dict(self.reply)}

    def _frame(self, item: Event) -> bytes:
        item["sequence_number"] = self._next_number
        self._next_number += 1
        return event(item)

    def _more_text(self, text: str) -> bytes:
        message = self._open
        assert isinstance(message, Message)
        message.add(text)
        number = self._next_number
        self._next_number = number + 1
        return message.before_delta + orjson.dumps(text) + b',"sequence_number":%d}\n\n' % number


def usage_of(answer: AnswerStream) -> dict[str, Any]:
    """The tokens of a finished answer."""
    num_output = len(answer.token_ids)
    return {
        "input_tokens": answer.num_prompt,
        "input_tokens_details": {"cached_tokens": answer.num_cached, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": answer.num_reasoning},
        "total_tokens": answer.num_prompt + num_output,
    }
