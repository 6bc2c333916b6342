"""The common middle of all generating endpoints: prompts in, a merged stream of outputs out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import Request

from quire import __version__
from quire.foundation.aside import MANY, aside
from quire.foundation.errors import InputError
from quire.foundation.log import get_logger
from quire.frontend import inputs
from quire.frontend.inputs import main_eos
from quire.frontend.replies import ReplyPlan
from quire.frontend.tokenization.truncation import NO_TRUNCATION, Truncation
from quire.server.generate.logprobs import LogprobWriter
from quire.server.generate.params import NAMES, field_names
from quire.server.generate.protocol import GenerationBody, LabelledBody
from quire.server.http.entry import IN_BACKGROUND, hand_over, retry_seconds
from quire.server.http.errors import ApiError
from quire.server.http.limits import MAX_ANSWERS
from quire.server.http.long_body import sent
from quire.server.http.rank import rank_of
from quire.server.http.trail import Trail, trail_of
from quire.server.metrics import RequestClock
from quire.server.service import Service
from quire.server.tracing import engine_trace
from quire.types.output import ABORTED, RequestOutput
from quire.types.request import BACKGROUND, TokenIds
from quire.types.sampling import RequestOutputKind, SamplingParams
from quire.types.structured import Constraint

log = get_logger(__name__)

FINGERPRINT = f"quire-{__version__}"
REFUSALS = {"queue_full": 503, "draining": 503, "invalid_request": 400}  # stop_reason → HTTP status; others 500
_KINDS = {"/v1/chat/completions": "chat_completions", "/v1/responses": "responses"}  # as metrics say it
_ENDED = {ABORTED: "aborted", "error": "failed"}  # as the log says it
A_CHOICE = 8  # log-probabilities that one takes as long as to write
STARTED_A_TURN = 16  # prompts of one request


@sent
@dataclass(frozen=True, slots=True)
class PromptIds:
    token_ids: TokenIds
    text: str | None = None
    constraint: Constraint | None = None  # of its answers
    embeds: np.ndarray | None = None  # what it is instead of its ids
    refusal: InputError | None = None  # why it cannot be answered: said where an answer would begin


@dataclass(slots=True)
class Generation:
    """One HTTP request being answered: `prompts` x `params.n` answers, numbered prompt by prompt."""

    service: Service
    id: str
    model: str
    prompts: list[PromptIds]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    engine_id: str
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)  # what the client calls fields of SamplingParams
    created: int = field(default_factory=lambda: int(time.time()))
    num_cached: int = 0
    num_generated: int = 0
    num_reasoning: int | None = None  # of these; None: the model does not think here
    trail: Trail = field(default_factory=lambda: Trail("", ""))  # of the HTTP request
    core: int | None = None  # that is to answer

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.n

    def shared(self, kind: str) -> dict[str, Any]:
        """The fields that a reply and each of its chunks begin with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once, however many answers it has."""
        prompt = sum(len(p.token_ids) for p in self.prompts)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        if self.num_reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return usage

    def note_calls(self, plan: ReplyPlan, *, found: bool) -> None:
        """An answer of a conversation has been read to its end."""
        metrics = self.service.metrics
        if metrics is not None and plan.calls:
            is_streamed = self.params.output_kind == RequestOutputKind.DELTA
            metrics.call_found(is_streamed=is_streamed, kind=_KINDS.get(self.trail.route, "other"), found=found)

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The news of all prompts as they come, each with the prompt's position. Closing it aborts the rest.

        Raises InputError if a prompt or option is refused, ApiError if the engine gave up on a request.
        """
        return self._one(0) if len(self.prompts) == 1 else self._all()

    async def _all(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        news: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()
        pumps: list[asyncio.Task[None]] = []
        try:
            for index in range(len(self.prompts)):
                pumps.append(asyncio.create_task(self._pump(index, news)))
                if len(pumps) % STARTED_A_TURN == 0:
                    await asyncio.sleep(0)  # they begin, and others get a turn
            running = len(pumps)
            while running:
                index, item = await news.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield index, item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, index: int, news: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]]) -> None:
        try:
            async with aclosing(self._one(index)) as source:
                async for item in source:
                    news.put_nowait(item)
        except Exception as error:
            news.put_nowait((index, error))
        else:
            news.put_nowait((index, None))

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The news of one prompt."""
        metrics = self.service.metrics
        assert metrics is not None
        prompt = self.prompts[index]
        if prompt.refusal is not None:
            metrics.end("error", count=self.params.n)
            with field_names(self.names):
                raise prompt.refusal
        request_id = self.engine_id if len(self.prompts) == 1 else f"{self.engine_id}-{index}"
        self.trail.engine_ids.append(request_id)
        self.trail.prompt_tokens += len(prompt.token_ids)
        streamed = self.params.output_kind == RequestOutputKind.DELTA
        clock, lengths, progress = RequestClock(metrics, streamed), Counter[int](), self.service.progress
        log_it = self.service.config.observe.enable_log_requests
        if log_it:
            log.info("request %s: %d prompt tokens, n=%d", request_id, len(prompt.token_ids), self.params.n)
        num_left, end = self.params.n, ABORTED  # answers that have not ended, and how they do if no more is heard
        with field_names(self.names):
            source = self._source(prompt, request_id)
            waits = False
            try:
                progress.wait()
                waits = True
                async for output in source:
                    progress.done()
                    waits = False
                    progress.seen()
                    clock.tick(output.metrics)
                    for answer in output.outputs:
                        lengths[answer.index] += len(answer.token_ids)
                        if answer.finish_reason is not None:
                            metrics.end(answer.finish_reason, output.metrics)
                            num_left -= 1
                    if output.error is not None:
                        raise self._refusal(output)
                    if output.finished:
                        self.num_cached += output.num_cached_tokens
                        longest = max(lengths.values(), default=0)
                        metrics.finish(output, lengths.total(), longest, self.params)
                        self.trail.cached_tokens += output.num_cached_tokens
                        self.trail.time(output.metrics)
                        num_left, end = 0, "finished"
                    yield index, output
                    progress.wait()
                    waits = True
            except Exception:
                end = "error"
                raise
            finally:
                self.trail.output_tokens += lengths.total()
                if num_left:
                    metrics.end(end, clock.times, num_left)
                if log_it:
                    log.info("request %s: %s with %d tokens", request_id, _ENDED.get(end, end), lengths.total())
                if waits:
                    progress.done()
                await source.aclose()

    def _source(self, prompt: PromptIds, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        given = inputs.Prompt(prompt.text, prompt.token_ids, embeds=prompt.embeds)  # have been read
        return self.service.running().generate(
            given,
            self.params,
            request_id,
            priority=self.priority,
            cache_salt=self.cache_salt,
            constraint=prompt.constraint,
            lora_request=self.service.adapter_of(self.model),
            trace=engine_trace(self.trail),
            data_parallel_rank=self.core,
        )

    def _refusal(self, output: RequestOutput) -> ApiError | InputError:
        """The engine gave up on a request: `stop_reason` says of what kind that is."""
        kind = next((answer.stop_reason for answer in output.outputs if answer.finish_reason == "error"), None)
        status = REFUSALS.get(str(kind), 500)
        if str(kind) in REFUSALS and self.service.metrics is not None:
            self.service.metrics.refuse(str(kind))
        message = output.error or "the engine gave up"
        if status == 400:
            return InputError(message, output.error_param)
        return ApiError(status, message, retry_after=retry_seconds(self.service))


async def tokenize(
    service: Service, text: str, *, add_special_tokens: bool, cut: Truncation = NO_TRUNCATION
) -> TokenIds:
    """Token ids of `text`, a prompt that is answered. Raises InputError for one that the context cannot hold."""
    return (await tokenize_all(service, [text], add_special_tokens=add_special_tokens, cut=cut))[0]


async def tokenize_all(
    service: Service, texts: Sequence[str], *, add_special_tokens: bool, cut: Truncation = NO_TRUNCATION
) -> list[TokenIds]:
    """Token ids of each of `texts`, prompts that are answered. Raises InputError for what the context cannot hold."""
    most = service.running().info.max_model_len - 1
    return await service.encoder.encode(texts, cut, add_special_tokens=add_special_tokens, most=most)


async def build_reply(outputs: Iterable[RequestOutput], build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`build()`, on a thread if log-probabilities or answers are many, so that other streams go on."""
    size = 0
    for output in outputs:
        size += len(output.prompt_logprobs or ())
        for answer in output.outputs:
            size += A_CHOICE + len(answer.logprobs or ())
    return await aside(build, size, MANY)


def truncation(service: Service, body: GenerationBody, params: SamplingParams) -> Truncation:
    """What the body asks for. Raises InputError for limits that cannot be."""
    wanted, side = body.truncate_prompt_tokens, body.truncation_side
    return Truncation.of_answered(wanted, side, service.running().info, params.max_tokens, params.min_tokens)


def start(
    request: Request,
    body: LabelledBody,
    model: str,
    prompts: list[PromptIds],
    params: SamplingParams,
    id_prefix: str,
    make: Callable[..., Generation] = Generation,
    *,
    clamp: bool = False,
) -> Generation:
    """clamp: an answer is as long as the context allows, whatever the client asks.

    Raises InputError for a request that asks for too many or too long answers, or a priority that has no effect.
    """
    service: Service = request.app.state.service
    if not clamp:
        _check_room(service, body, prompts)
    if len(prompts) * params.n > MAX_ANSWERS:
        raise InputError(f"prompts x n must be <= {MAX_ANSWERS}, got {len(prompts)} x {params.n}", "n")
    if body.priority and service.config.schedule.scheduling_policy != "priority":
        raise InputError("priority needs a server with scheduling_policy=priority", "priority")
    core = rank_of(request, service.running().info)
    header_id = request.headers.get("x-request-id", "")[:256]
    reply_id = f"{id_prefix}-{body.request_id or header_id or secrets.token_hex(12)}"
    hand_over(request, len(prompts) * params.n)
    trail = trail_of(request.scope)
    trail.reply_id, trail.model, trail.params = reply_id, model, params
    # A header may come twice (a proxy's retry); an id in the body is promised to be unique.
    is_unique = body.request_id or not header_id
    return make(
        service=service,
        id=reply_id,
        engine_id=reply_id if is_unique else f"{reply_id}-{secrets.token_hex(4)}",
        model=model,
        prompts=prompts,
        params=params,
        priority=BACKGROUND if request.scope.get(IN_BACKGROUND) else body.priority,
        cache_salt=body.cache_salt,
        trail=trail,
        core=core,
    )


def _check_room(service: Service, body: LabelledBody, prompts: Iterable[PromptIds]) -> None:
    """Raises InputError for a limit that the context does not hold beside a prompt.

    A prompt that leaves nothing at all, or was not even read for its length, is refused as such, later.
    """
    if body.asked_tokens is None:
        return
    name, asked = body.asked_tokens
    context = service.running().info.max_model_len
    lengths = [len(prompt.token_ids) for prompt in prompts if prompt.refusal is None]
    longest = max((length for length in lengths if length < context), default=None)
    if longest is not None and asked > context - longest:
        raise InputError(
            f"{name} is too large: {asked}. This model's maximum context length is {context} tokens (max_model_len) "
            f"and the request has {longest} input tokens, which leave {context - longest} for the answer",
            name,
        )


def logprob_writer(service: Service, params: SamplingParams, top: int, *, as_ids: bool = False) -> LogprobWriter:
    """Of one answer."""
    engine = service.running()
    tokenizer = engine.get_tokenizer()
    stop_ids = stop_ids_of(service, params)
    return LogprobWriter(tokenizer, params, stop_ids, as_ids=as_ids, top=top)


def stop_ids_of(service: Service, params: SamplingParams) -> frozenset[int | None]:
    """Tokens that end an answer."""
    engine = service.running()
    eos = main_eos(engine.info, engine.get_tokenizer())
    return frozenset({eos, *engine.info.resolved.info.eos_token_ids, *params.stop_token_ids})
