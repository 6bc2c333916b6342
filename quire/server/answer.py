"""One answer as a stream of pieces: what the Responses and the Messages endpoints share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from quire.frontend.replies import ReplyParser, ReplyPlan
from quire.server.generation import Generation
from quire.server.logprobs import LogprobWriter
from quire.server.service import Service
from quire.types.output import CompletionOutput
from quire.types.reply import Content, Piece, Reasoning
from quire.types.sampling import RequestOutputKind


class Answer:
    """The only answer of a job while it is made: its pieces as they come, and its numbers."""

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
            self.logprobs = ContentLogprobs(job.service, plan, job.params.skip_special_tokens, top_logprobs)

    @property
    def num_reasoning(self) -> int:
        return self.plan.count_reasoning(self.token_ids)

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """The first list comes, perhaps empty, with the first news of the engine: the request was accepted.

        Raises what `Generation.outputs` raises. Closing it aborts the request.
        """
        parser, tidy = self.plan.parser(), Tidy()
        is_delta = self.job.params.output_kind == RequestOutputKind.DELTA
        async with aclosing(self.job.outputs()) as outputs:
            async for _, output in outputs:
                self.num_cached = output.num_cached_tokens
                for answer in output.outputs:
                    if is_delta:
                        self.token_ids += answer.token_ids
                    else:
                        self.token_ids = answer.token_ids
                    if self.logprobs is not None:
                        self.logprobs.take(answer)
                    pieces = tidy.add(parser.feed(answer.text)) if answer.text else []
                    if answer.finish_reason is not None:
                        pieces += tidy.add(parser.finish())
                        pieces += tidy.finish()
                        self.finish_reason = parser.finish_reason(answer.finish_reason)
                        self.stop_reason = answer.stop_reason
                    yield pieces


class Tidy:
    """Drops text that is blank from where it begins to where it ends: line breaks between reasoning, text and calls.

    An answer that is nothing else keeps it.
    """

    def __init__(self) -> None:
        self._open: type[Content | Reasoning] | None = None  # the kind of text that goes on
        self._held: Content | Reasoning | None = None  # blank so far
        self._is_empty = True

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

    def __init__(self, service: Service, plan: ReplyPlan, skip_special_tokens: bool, top: int) -> None:
        self._tokenizer = service.tokenizer()
        self._parser: ReplyParser = plan.parser()
        self._tidy = Tidy()
        self._writer = LogprobWriter(as_ids=False, top=top, decode=self._tokenizer.decode)
        self._skip = skip_special_tokens
        self._pending: list[tuple[int, dict[str, Any]]] = []  # of tokens that are not decided, with their characters
        self._ready: list[dict[str, Any]] = []

    def take(self, answer: CompletionOutput) -> None:
        ids, positions = answer.token_ids, answer.logprobs or []
        if answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str):
            ids = ids[:-1]  # the token that ended the answer is no part of it
        entries = self._writer.chat(ids, positions[: len(ids)])["content"]
        for token, entry in zip(ids, entries, strict=True):
            text = self._tokenizer.decode([token], skip_special_tokens=self._skip)
            if text:
                self._pending.append((len(text), entry))
                self._settle(self._parser.feed(text))
        if answer.finish_reason is not None:
            self._settle(self._parser.finish())

    def drain(self) -> list[dict[str, Any]]:
        """Entries since the last time, in the shape of chat's logprobs."""
        ready, self._ready = self._ready, []
        return ready

    def _settle(self, pieces: list[Piece]) -> None:
        """Content that became certain is the end of what is pending; markers may stand before it."""
        pieces = self._tidy.add(pieces)
        missing = sum(len(piece.text) for piece in pieces if isinstance(piece, Content))
        start = len(self._pending)
        while missing > 0 and start > 0:
            start -= 1
            missing -= self._pending[start][0]
        self._ready += [entry for _, entry in self._pending[start:]]
        if pieces:
            self._pending = []
