"""EngineOutputs → RequestOutputs: text, log-probabilities, the fan-in of n answers, cumulative, delta or final.

Nothing is queued. Each answer grows in place and remembers what its reader has seen; `take` gives the news since then.
A slow reader gets fewer and larger outputs, and holds no more memory than the answers themselves.
"""

from __future__ import annotations

import time
from asyncio import Future
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from quire.foundation.errors import InputError
from quire.frontend.ended import Ended
from quire.frontend.journal import Journal
from quire.frontend.tokenization.detokenizer import Detokenizer, can_wait
from quire.frontend.tokenization.stops import StopAutomaton, stop_automaton
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.types.output import (
    CompletionOutput,
    EngineOutput,
    EngineOutputs,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Spent,
    TokenLogprobs,
)
from quire.types.request import EngineRequest
from quire.types.sampling import RequestOutputKind, SamplingParams


class Answer:
    """One of the n answers of a request while it grows."""

    def __init__(
        self,
        index: int,
        request_id: str,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        stops: StopAutomaton | None,
    ) -> None:
        self.index = index
        self.request_id = request_id  # of the EngineRequest
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.token_ids: list[int] = []
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        self._waits = False  # the text is decoded at once, at the end
        if tokenizer is not None and params.detokenize:
            self._waits = can_wait(tokenizer.decoding, params)
            if not self._waits:
                self._detokenizer = Detokenizer(tokenizer.decoding, params, stops)
        self._text = ""  # what the reader has seen (not kept for deltas)
        self._fresh_text: list[str] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._num_seen = 0  # tokens the reader has seen
        self._finish_is_seen = False

    def add(self, output: EngineOutput) -> None:
        """Take in the news of one step. A stop string in it finishes the answer; tokens behind it are dropped."""
        ends_with_stop_token = (
            output.finish_reason == "stop"
            and not output.lacks_stop_token
            and not self._params.include_stop_str_in_output
        )
        num_shown = len(output.token_ids) - (1 if ends_with_stop_token else 0)
        num_taken = len(output.token_ids)
        if self._detokenizer is not None:
            for count, token in enumerate(output.token_ids[:num_shown], 1):
                self._fresh_text.append(self._detokenizer.push(token))
                if self._detokenizer.stop is not None:
                    num_taken = count
                    break
        self.token_ids += output.token_ids[:num_taken]
        for entry in (output.logprobs or [])[:num_taken]:
            self._cumulative_logprob += entry.logprobs[0]
            ranked = self._params.logprob_token_ids is None
            self._logprobs.append(logprobs_dict(entry, self._tokenizer, ranked=ranked))
        if self._detokenizer is not None and self._detokenizer.stop is not None:
            self._finish("stop", self._detokenizer.stop)
        elif output.finish_reason is not None:
            if self._waits and self._tokenizer is not None:
                shown = self.token_ids[:-1] if ends_with_stop_token else self.token_ids
                skip = self._params.skip_special_tokens
                self._fresh_text.append(self._tokenizer.decode(shown, skip_special_tokens=skip))
            self._finish(output.finish_reason, output.stop_reason)

    def push(self, token: int) -> None:
        """`add` for a step with one token and nothing else to tell."""
        self.token_ids.append(token)
        detokenizer = self._detokenizer
        if detokenizer is not None:
            text = detokenizer.push(token)
            if text:
                self._fresh_text.append(text)
            if detokenizer.stop is not None:
                self._finish("stop", detokenizer.stop)

    @property
    def logprobs(self) -> list[dict[int, Logprob]]:
        """Of its tokens so far, each one's own first; empty if nobody asked for them."""
        return self._logprobs

    def abort(self) -> None:
        self._finish("abort", None)

    def has_news(self, interval: int = 1) -> bool:
        """Whether a reader should be woken: a first token, `interval` more tokens, or the end."""
        unseen = len(self.token_ids) - self._num_seen
        if self.finish_reason is not None:
            return not self._finish_is_seen
        return unseen >= interval or (unseen > 0 and self._num_seen == 0)

    def take(self, *, delta: bool) -> CompletionOutput:
        """What the reader gets now; it counts as seen."""
        fresh = "".join(self._fresh_text)
        self._fresh_text.clear()
        if not delta:
            self._text += fresh
        start = self._num_seen if delta else 0
        self._num_seen = len(self.token_ids)
        self._finish_is_seen = self.finish_reason is not None
        wants_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=fresh if delta else self._text,
            token_ids=self.token_ids[start:],
            cumulative_logprob=self._cumulative_logprob if wants_logprobs else None,
            logprobs=self._logprobs[start:] if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        if self._detokenizer is not None:
            self._fresh_text.append(self._detokenizer.finish())
        self.finish_reason, self.stop_reason = reason, stop_reason


class TimedAnswer(Answer):
    """One that says how long its tokens took to become text."""

    def __init__(self, spent: Spent, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._spent = spent

    def add(self, output: EngineOutput) -> None:
        began = time.perf_counter()
        super().add(output)
        self._spent.add(time.perf_counter() - began)

    def push(self, token: int) -> None:
        began = time.perf_counter()
        super().push(token)
        self._spent.add(time.perf_counter() - began)


class RequestState:
    """One request of the user on its way: its answers, its prompt, its times."""

    def __init__(
        self,
        requests: Sequence[EngineRequest],
        request_id: str,
        prompt_text: str | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        params = requests[0].params
        stops = stop_automaton(tuple(params.stop)) if params.stop else None
        self.request_id = request_id
        self.metrics = RequestMetrics(arrival_time=requests[0].arrival)
        make = Answer if requests[0].trace is None else partial(TimedAnswer, self.metrics.detokenizing)
        self.answers = [make(i, r.id, r.params, tokenizer, stops) for i, r in enumerate(requests)]
        self._only = self.answers[0] if len(self.answers) == 1 else None
        self.kind = params.output_kind
        self.waiter: Future[None] | None = None  # of the reader, while it waits for news
        self.error: str | None = None
        self.error_param: str | None = None
        self._prompt_text = prompt_text
        self._prompt = requests[0].token_ids
        self._tokenizer = tokenizer
        self._wants_prompt_logprobs = params.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self._prompt_logprobs_seen = False
        self._num_cached_tokens = 0
        self.vectors: np.ndarray | None = None  # of a pooling request, at its end

    @property
    def finished(self) -> bool:
        if self._only is not None:
            return self._only.finish_reason is not None
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt)

    @property
    def num_cached_tokens(self) -> int:
        return self._num_cached_tokens

    @property
    def prompt_text(self) -> str | None:
        """None: it came as token ids."""
        return self._prompt_text

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        return self._prompt.tolist()  # type: ignore[no-any-return]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def running_ids(self) -> list[str]:
        return [answer.request_id for answer in self.answers if answer.finish_reason is None]

    def add(self, answer: Answer, output: EngineOutput, now: float) -> None:
        answer.add(output)
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs:
            self._prompt_logprobs += [logprobs_dict(entry, self._tokenizer) for entry in output.prompt_logprobs]
        if output.error is not None:
            self.error, self.error_param = output.error, output.error_param
        if output.pooled is not None:
            self.vectors = output.pooled
        metrics = self.metrics
        metrics.engine = output.engine
        metrics.num_preemptions += output.num_preemptions
        if output.life is not None:
            metrics.life += output.life
        if metrics.first_scheduled_time is None and output.queued:
            metrics.first_scheduled_time = metrics.arrival_time + output.queued
        if metrics.first_token_time is None and output.token_ids:
            metrics.first_token_time = now
        self.note_end(now)

    def note_end(self, now: float) -> None:
        """Keep the time if all answers have ended."""
        if self.finished:
            self.metrics.finished_time = now

    def abort(self, now: float) -> None:
        """End the answers that are still growing."""
        for answer in self.answers:
            if answer.finish_reason is None:
                answer.abort()
        self.metrics.finished_time = now

    def has_news(self, interval: int = 1) -> bool:
        if self.kind == RequestOutputKind.FINAL_ONLY:
            return self.finished and any(answer.has_news() for answer in self.answers)
        if self._only is not None:
            return self._only.has_news(interval)
        return any(answer.has_news(interval) for answer in self.answers)

    def take(self) -> RequestOutput:
        """All news since the last `take`: of a cumulative request every answer, of a delta request those that grew."""
        delta = self.kind == RequestOutputKind.DELTA
        answers = [a for a in self.answers if a.has_news()] if delta and self._only is None else self.answers
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt_text,
            prompt_ids=self._prompt,
            outputs=[answer.take(delta=delta) for answer in answers],
            finished=self.finished,
            prompt_logprobs=self._take_prompt_logprobs(delta),
            num_cached_tokens=self._num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
            error_param=self.error_param,
        )

    def _take_prompt_logprobs(self, delta: bool) -> list[dict[int, Logprob] | None] | None:
        """Once they are complete; a reader of deltas gets them once."""
        complete = len(self._prompt_logprobs) >= self.num_prompt_tokens
        if not self._wants_prompt_logprobs or not complete or (delta and self._prompt_logprobs_seen):
            return None
        self._prompt_logprobs_seen = True
        return self._prompt_logprobs


class OutputProcessor:
    """All requests on their way, by the ids the engine knows them under."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._by_engine_id: dict[str, tuple[RequestState, Answer]] = {}
        self._by_id: dict[str, RequestState] = {}
        self.journal = Journal()  # of the requests whose outputs are expected
        self.ended: Ended[RequestState] = Ended()

    def __len__(self) -> int:
        return len(self._by_id)

    def running(self) -> list[RequestState]:
        return list(self._by_id.values())

    def having(self, engine_ids: Iterable[str]) -> list[RequestState]:
        """Those that run and of which the engine knows such an id."""
        found = (self._by_engine_id[each][0] for each in engine_ids if each in self._by_engine_id)
        return list({id(request_state): request_state for request_state in found}.values())

    def find(self, request_id: str) -> RequestState | None:
        """One that runs, or has ended while somebody watched; by its own id or an answer's."""
        if (known := self._by_id.get(request_id) or self.ended.find(request_id)) is not None:
            return known
        entry = self._by_engine_id.get(request_id)
        return None if entry is None else entry[0]

    def add(self, requests: Sequence[EngineRequest], request_id: str, prompt_text: str | None) -> RequestState:
        """Expect outputs for `requests`. Raises InputError if the id is in use."""
        if request_id in self._by_id or any(r.id in self._by_engine_id for r in requests):
            raise InputError(f"request_id {request_id!r} is in use by a request that has not finished", "request_id")
        request_state = RequestState(requests, request_id, prompt_text, self._tokenizer)
        self._by_id[request_id] = request_state
        for request, answer in zip(requests, request_state.answers, strict=True):
            self._by_engine_id[answer.request_id] = (request_state, answer)
            self.journal.open(request, answer.token_ids)
        return request_state

    def process(self, outputs: EngineOutputs) -> tuple[list[RequestState], list[str]]:
        """Take in the news of a step: the requests it concerns, and the engine ids to abort (stop strings found)."""
        push = self.push if outputs.counts is None else self.push_parts
        changed, aborts = push(outputs.ids or (), outputs.column)
        more, late = self.add_special(outputs.special)
        return list(dict.fromkeys(changed + more)), aborts + late

    def push(self, ids: Sequence[str], tokens: Sequence[int]) -> tuple[list[RequestState], list[str]]:
        """One token for each of the engine ids."""
        changed: list[RequestState] = []
        aborts: list[str] = []
        find = self._by_engine_id.get
        for engine_id, token in zip(ids, tokens, strict=True):
            entry = find(engine_id)
            if entry is None:
                continue  # aborted meanwhile
            request_state, answer = entry
            answer.push(token)
            changed.append(request_state)
            if answer.finish_reason is not None:
                aborts.append(engine_id)
                request_state.note_end(time.time())
                self._forget(engine_id, request_state)
        return changed, aborts

    def push_parts(self, ids: Sequence[str], parts: Sequence[Sequence[int]]) -> tuple[list[RequestState], list[str]]:
        """Some tokens for each of the engine ids; those behind the end of an answer are dropped."""
        changed: list[RequestState] = []
        aborts: list[str] = []
        for engine_id, part in zip(ids, parts, strict=True):
            entry = self._by_engine_id.get(engine_id)
            if entry is None:
                continue  # aborted meanwhile
            request_state, answer = entry
            changed.append(request_state)
            for token in part:
                answer.push(token)
                if answer.finish_reason is not None:
                    aborts.append(engine_id)
                    request_state.note_end(time.time())
                    self._forget(engine_id, request_state)
                    break
        return changed, aborts

    def add_special(self, outputs: Sequence[EngineOutput]) -> tuple[list[RequestState], list[str]]:
        now = time.time()
        changed: list[RequestState] = []
        aborts: list[str] = []
        for output in outputs:
            entry = self._by_engine_id.get(output.request_id)
            if entry is None:
                continue  # aborted meanwhile
            request_state, answer = entry
            request_state.add(answer, output, now)
            changed.append(request_state)
            if answer.finish_reason is not None:
                if output.finish_reason is None:
                    aborts.append(output.request_id)
                self._forget(output.request_id, request_state)
        return changed, aborts

    def _forget(self, engine_id: str, request_state: RequestState) -> None:
        """An answer has ended."""
        del self._by_engine_id[engine_id]
        self.journal.close(engine_id)
        if request_state.finished:
            del self._by_id[request_state.request_id]
            self.ended.keep(request_state)

    def abort(self, request_id: str) -> tuple[RequestState | None, list[str]]:
        """End a request: itself (None if it is unknown or has finished) and the engine ids to abort."""
        request_state = self._by_id.pop(request_id, None)
        if request_state is None:
            return None, []
        running = request_state.running_ids
        for engine_id in running:
            del self._by_engine_id[engine_id]
            self.journal.close(engine_id)
        request_state.abort(time.time())
        self.ended.keep(request_state)
        return request_state, running


def logprobs_dict(entry: TokenLogprobs, tokenizer: Tokenizer | None, *, ranked: bool = True) -> dict[int, Logprob]:
    """Token id → Logprob: the token itself first, then the most likely ones by rank, or others (not ranked)."""
    found: dict[int, Logprob] = {}
    for position, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token not in found:
            rank = entry.rank if not position else position if ranked else None
            found[token] = Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token))
    return found
