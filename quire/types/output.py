"""What comes back: EngineOutput from the core (token ids), RequestOutput to the user (text)."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from quire.types.adapter import LoRARequest
from quire.types.reply import ToolCall
from quire.types.request import TokenIds, token_list
from quire.types.view import LifeEvent

ABORTED = "abort"  # the finish_reason of a request that nobody wants any more
# `stop_reason` of an output with finish_reason "error", for programs; `error` says it to people.
INVALID_REQUEST = "invalid_request"  # can never run here
QUEUE_FULL = "queue_full"  # max_num_queued_reqs; later it may
DRAINING = "draining"  # the engine finishes what it has and takes nothing new
STEP_FAILED = "step_failed"  # engines die of it
PROCESSOR_FAILED = "processor_failed"  # a logits processor raised for it


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log-probabilities of one position; entry 0 is the sampled (or prompt) token, then the top-k."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of entry 0, 1-based


class EngineOutput(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """News of one request after one step, if it is more than a token."""

    request_id: str
    token_ids: list[int] = msgspec.field(default_factory=list)  # new ones only
    logprobs: list[TokenLogprobs] | None = None  # one a new token
    prompt_logprobs: list[TokenLogprobs] | None = None  # new prompt positions, in order, from position 1
    finish_reason: str | None = None  # stop | length | repetition | abort | error
    stop_reason: int | str | None = None  # the stop token id; None for EOS; after an error one of the words above
    lacks_stop_token: bool = False  # finished by "stop" although the last token is none: the grammar is complete
    pooled: np.ndarray | None = None  # float32 [1 or tokens, size]: the end of a pooling request
    num_cached_tokens: int = 0
    queued: float = 0.0  # seconds from arrival to first scheduling, set on the first output
    num_preemptions: int = 0
    error: str | None = None
    error_param: str | None = None  # the field that it is about, as users know it
    life: list[LifeEvent] | None = None  # with the end of a request that is traced
    engine: int = 0  # the core's number, where there are several


class QueueClass(msgspec.Struct, frozen=True, array_like=True):
    """The requests of one priority; smaller goes first."""

    priority: int
    waiting: int
    tokens: int  # of the prompts that wait, those not counted that the prefix cache will probably have
    running: int


class QueueStats(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Who waits, and what the steps measured say of how fast that goes (`scheduling.load.predict_wait`)."""

    classes: list[QueueClass] = msgspec.field(default_factory=list)  # by priority
    prefilling: int = 0  # prompt tokens that running requests lack
    free_seats: int = 0  # that a waiting request could take; 0 if blocks are what it lacks
    seats_per_second: float = 0.0  # that come free while all are taken; 0: unknown
    tokens_per_second: float = 0.0  # of prompts, in steps that are full of them; 0: unknown
    mean_tokens: float = 0.0  # of a prompt, those not counted that the prefix cache had
    num_begun: int = 0  # requests that have had a seat since the start, those in the background not counted
    as_of: float = 0.0  # time.monotonic(): what was sent to the core before is counted


class EngineStats(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Counters of the core, and of those whose place it took, and gauges of now; merged into /metrics by the server."""

    num_running: int = 0
    running_adapters: list[str] = msgspec.field(default_factory=list)
    waiting_adapters: list[str] = msgspec.field(default_factory=list)
    num_waiting: int = 0
    num_deferred: int = 0  # of these, for a grammar or a slot of their adapter
    computed_tokens: int = 0  # of prompts, and of requests that go on after a preemption
    num_steps: int = 0
    kv_usage: float = 0.0  # 0 … 1
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_seats_used: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    num_preemptions: int = 0
    num_drafts: int = 0  # times that drafts of a request were verified
    num_draft_tokens: int = 0  # that were
    num_accepted_tokens: int = 0  # of them
    num_accepted_per_pos: list[int] = msgspec.field(default_factory=list)  # by their place in the draft
    operations: float = 0.0  # of the device, estimated (enable_mfu_metrics) …
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    floor_seconds: float = 0.0  # … and the time that these take at least; 0: unknown
    num_restarts: int = 0  # engines that took the place of one that had died
    is_up: bool = True  # no other has to take its place
    last_step_time: float = 0.0  # time.time() of the last settled step
    queue: QueueStats | None = None
    step_tokens: list[int] = msgspec.field(default_factory=list)  # tokens of the steps since the last report …
    step_seconds: list[float] = msgspec.field(default_factory=list)  # … what they took the device …
    step_gaps: list[float] = msgspec.field(default_factory=list)  # … and how long it had nothing to do before them
    # Of some blocks, since the last report (kv_cache_metrics):
    block_lifetimes: list[float] = msgspec.field(default_factory=list)
    block_idles: list[float] = msgspec.field(default_factory=list)  # before they were forgotten
    block_gaps: list[float] = msgspec.field(default_factory=list)  # between two uses
    phase_seconds: dict[str, float] = msgspec.field(
        default_factory=dict
    )  # idle, hold, inbox, plan, submit, mask, wait, settle, outbox
    engines: list[EngineStats] = msgspec.field(default_factory=list)  # of several cores, whose sum this is: each one's

    def counted(self) -> EngineStats:
        """Without the lists of what has happened since the last report, which must count once."""
        return msgspec.structs.replace(
            self, step_tokens=[], step_seconds=[], step_gaps=[], block_lifetimes=[], block_idles=[], block_gaps=[]
        )


class EngineOutputs(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One message from the core: the news of all requests of one step, now and then with statistics.

    Most requests have one token to tell and nothing else: they are columns. No request is in `ids` and `special` both.
    """

    # Of the requests with just a token; not to be changed. On a wire None: those of the latest message that had any.
    ids: list[str] | None = msgspec.field(default_factory=list)
    tokens: list[int] = msgspec.field(default_factory=list)  # of each of `ids`, one behind the other
    counts: list[int] | None = None  # how many of them are each one's; None: one each
    special: list[EngineOutput] = msgspec.field(default_factory=list)
    stats: EngineStats | None = None

    def each(self) -> list[EngineOutput]:
        """All of it request by request, for those who do not mind the objects."""
        parts = [[token] for token in self.tokens] if self.counts is None else self.column
        plain = zip(self.ids or (), parts, strict=True)
        return [*(EngineOutput(request_id=i, token_ids=part) for i, part in plain), *self.special]

    @property
    def column(self) -> list[Any]:
        """For each of `ids` its token, or with `counts` the list of its tokens."""
        return self.tokens if self.counts is None else pieces(self.tokens, self.counts)


def pieces(tokens: list[int], counts: list[int]) -> list[list[int]]:
    """The tokens cut into so many each."""
    return [tokens[end - count : end] for end, count in zip(itertools.accumulate(counts), counts, strict=True)]


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop | length | repetition | abort | error
    stop_reason: int | str | None = None
    # Of an answer to a conversation, the parts of `text`:
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_cut(self) -> bool:
        """It did not end by itself: a limit or a stop string ended it."""
        return self.finish_reason is not None and (self.finish_reason != "stop" or isinstance(self.stop_reason, str))


@dataclass(slots=True)
class Spent:
    """Time spent in many small pieces: seconds of all, and time.time() of the first."""

    seconds: float = 0.0
    first: float = 0.0

    def add(self, seconds: float) -> None:
        if not self.first:
            self.first = time.time() - seconds
        self.seconds += seconds


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds (time.time())."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    replays: list[tuple[float, float]] = field(default_factory=list)  # from an engine's death to the next that had it
    engine: int | None = None  # number of the core that told of it last; None: none has
    # Of a request that is traced:
    life: list[LifeEvent] = field(default_factory=list)
    detokenizing: Spent = field(default_factory=Spent)


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_ids: TokenIds = field(compare=False)  # an array until somebody asks for the list
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    error_param: str | None = None  # the field that it is about, if it is about one
    lora_request: LoRARequest | None = None  # of `LLM`'s own: what it was answered with

    @property
    def prompt_token_ids(self) -> list[int]:
        if not isinstance(self.prompt_ids, list):
            self.prompt_ids = token_list(self.prompt_ids)
        return self.prompt_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)


@dataclass(slots=True)
class BeamSearchSequence:
    orig_prompt: str | list[int]
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence] = field(default_factory=list)
