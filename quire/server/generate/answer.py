"""One answer as a stream of pieces, and what writes it: what the Responses and the Messages endpoints share."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from quire.frontend.replies import ReplyParser, ReplyPlan
from quire.server.generate.generation import Generation, logprob_writer
from quire.server.generate.logprobs import LogprobWriter
from quire.types.output import CompletionOutput, RequestOutput
from quire.types.reply import Content, Piece, Reasoning
from quire.types.sampling import RequestOutputKind

Event = dict[str, Any]


class AnswerStream:
    """The only answer of a job while it is made: its pieces, and its numbers."""

    def __init__(self, job: Generation, plan: ReplyPlan, top_logprobs: int | None = None) -> None:
        """top_logprobs: alternatives a token; None: no log-probabilities."""
        self.job = job
        self.plan = plan
        self.num_prompt = sum(len(prompt.token_ids) for prompt in job.prompts)
        self.num_cached = 0
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: ContentLogprobs | None = None
        if top_logprobs is not None:
            job.service.tokenizer()  # there must be one
            self.logprobs = ContentLogprobs(plan, logprob_writer(job.service, job.params, top_logprobs))
        self._parser = plan.parser()
        self._tidy = Tidy()
        self._is_delta = job.params.output_kind == RequestOutputKind.DELTA
        self._may_flow = self._is_delta and plan.is_plain and self.logprobs is None
        self._flows = False  # inside text that nothing but the end can end

    @property
    def num_reasoning(self) -> int:
        return self.plan.count_reasoning(self.token_ids)

    def take(self, output: RequestOutput) -> list[Piece]:
        """What the engine's latest news add."""
        (answer,) = output.outputs
        self.num_cached = output.num_cached_tokens
        if self._is_delta:
            self.token_ids += answer.token_ids
        else:
            self.token_ids = answer.token_ids
        if self.logprobs is not None:
            self.logprobs.take(answer)
        pieces = self._tidy.add(self._parser.feed(answer.text)) if answer.text else []
        if answer.finish_reason is not None:
            pieces += self._tidy.add(self._parser.finish(is_cut=answer.is_cut))
            pieces += self._tidy.finish()
            self.finish_reason = self._parser.finish_reason(answer.finish_reason)
            self.job.note_calls(self.plan, found=self._parser.has_calls)
            self.stop_reason = answer.stop_reason
        self._flows = self._may_flow and self._tidy.is_in_content
        return pieces

    def take_text(self, output: RequestOutput) -> str | None:
        """`take` where text goes on and nothing else can happen: cheaper. None: `take` it."""
        answer = output.outputs[0]
        if not self._flows or answer.finish_reason is not None:
            return None
        self.token_ids += answer.token_ids
        return answer.text


class AnswerWriter(ABC):
    """Writes an answer as events that add up to `reply`; a reply that is not streamed is what they leave behind."""

    def __init__(self, answer: AnswerStream) -> None:
        self.reply: dict[str, Any] = {}
        self._answer = answer
        self._is_begun = False

    async def whole(self) -> dict[str, Any]:
        """The finished reply. Raises what `Generation.outputs` raises."""
        async with aclosing(self._answer.job.outputs()) as outputs:
            async for _, output in outputs:
                self.take(output)
        return self.reply

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Its events. The first come with the first news of the engine, when the request was accepted."""
        async with aclosing(self._answer.job.outputs()) as outputs:
            async for _, output in outputs:
                if frames := self.take(output):
                    yield b"".join(frames)

    def take(self, output: RequestOutput) -> list[bytes]:
        """The events, one each, that the engine's latest news make."""
        text = self._answer.take_text(output)
        if text is not None:
            return [self._more_text(text)] if text else []
        pieces = self._answer.take(output)
        frames: list[bytes] = []  # events show things as they are then: each is written before the next comes to be
        if not self._is_begun:
            self._is_begun = True
            frames += map(self._frame, self._begin())
        for piece in pieces:
            frames += map(self._frame, self._add(piece))
        if self._answer.finish_reason is not None:
            frames += map(self._frame, self._end())
        return frames

    @abstractmethod
    def failed(self, error: Exception) -> bytes:
        """The last event of a reply that cannot be finished."""

    @abstractmethod
    def _begin(self) -> Iterable[Event]: ...

    @abstractmethod
    def _add(self, piece: Piece) -> Iterable[Event]: ...

    @abstractmethod
    def _end(self) -> Iterable[Event]: ...

    @abstractmethod
    def _frame(self, item: Event) -> bytes: ...

    @abstractmethod
    def _more_text(self, text: str) -> bytes:
        """The event that adds to the text that is being written."""


class Tidy:
    """Drops text that is blank from where it begins to where it ends: line breaks between reasoning, text and calls.

    An answer that is nothing else keeps it.
    """

    def __init__(self) -> None:
        self._open: type[Content | Reasoning] | None = None  # the kind of text that goes on
        self._held: Content | Reasoning | None = None  # blank so far
        self._is_empty = True

    @property
    def is_in_content(self) -> bool:
        return self._open is Content

    def add(self, pieces: Iterable[Piece]) -> list[Piece]:
        kept: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content | Reasoning):
                kept += self._text(piece)
            else:
                self._open = self._held = None
                kept.append(piece)
        self._is_empty = self._is_empty and not kept
        return kept

    def finish(self) -> list[Piece]:
        return [self._held] if self._is_empty and isinstance(self._held, Content) else []

    def _text(self, piece: Content | Reasoning) -> list[Piece]:
        kind = type(piece)
        if kind is self._open:
            return [piece] if piece.text else []
        if type(self._held) is kind:
            piece = kind(self._held.text + piece.text)
        if not piece.text or piece.text.isspace():
            self._held = piece
            return []
        self._open, self._held = kind, None
        return [piece]


class ContentLogprobs:
    """Which tokens made the content: a second parser reads the answer token by token.

    So it does not matter in what portions the answer came.
    """

    def __init__(self, plan: ReplyPlan, writer: LogprobWriter) -> None:
        self._parser: ReplyParser = plan.parser()
        self._tidy = Tidy()
        self._writer = writer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[tuple[int, dict[str, Any]]] = []  # of tokens that are not decided, with their characters
        self._ready: list[dict[str, Any]] = []

    def take(self, answer: CompletionOutput) -> None:
        for entry in self._writer.chat(answer)["content"]:
            if not entry["bytes"]:
                continue  # no part of the text
            text = self._utf8.decode(bytes(entry["bytes"]))
            self._pending.append((len(text), entry))
            if text:
                self._settle(self._parser.feed(text))
        if answer.finish_reason is not None:
            if rest := self._utf8.decode(b"", final=True):
                self._settle(self._parser.feed(rest))
            self._settle(self._parser.finish(is_cut=answer.is_cut))

    def drain(self) -> list[dict[str, Any]]:
        """Entries since the last time, in the shape of chat's logprobs."""
        ready, self._ready = self._ready, []
        return ready

    def _settle(self, pieces: list[Piece]) -> None:
        """Content that became certain is the end of what is pending; markers may stand before it."""
        pieces = self._tidy.add(pieces)
        missing = sum(len(piece.text) for piece in pieces if isinstance(piece, Content))
        start = len(self._pending)
        has_content = missing > 0
        while missing > 0 and start > 0:
            start -= 1
            missing -= self._pending[start][0]
        while has_content and start > 0 and not self._pending[start - 1][0]:
            start -= 1  # the first bytes of the first character
        self._ready += [entry for _, entry in self._pending[start:]]
        if pieces:
            self._pending = []
