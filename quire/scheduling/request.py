"""Request: one EngineRequest on its way through the scheduler."""

from __future__ import annotations

import time
from array import array
from enum import IntEnum

import numpy as np

from quire.foundation.errors import InputError
from quire.kv.hashing import extra_key
from quire.scheduling.constraint import ConstraintState
from quire.scheduling.repetition import RepetitionDetector
from quire.types.output import TokenLogprobs
from quire.types.plan import Admit
from quire.types.request import EngineRequest
from quire.types.sampling import RequestOutputKind
from quire.types.view import LifeEvent

MAX_EVENTS = 256  # of the life of a request
REPORT_TOKENS = 256  # of a quiet answer are told at a time: so many are lost at most if the engine is killed
Rank = tuple[int, int]  # (class: priority or BACKGROUND, order of arrival); the smaller goes first


class Status(IntEnum):
    WAITING = 0  # never had a seat
    RUNNING = 1  # has a seat
    PREEMPTED = 2  # had to give its seat and blocks back; waits to go on
    FINISHED = 3
    COMPILING = 4  # its grammar is being compiled: it stands aside, and takes its place in the queue afterwards


_LEGAL = {
    Status.COMPILING: {Status.WAITING, Status.FINISHED},
    Status.WAITING: {Status.RUNNING, Status.FINISHED},
    Status.RUNNING: {Status.PREEMPTED, Status.FINISHED},
    Status.PREEMPTED: {Status.RUNNING, Status.FINISHED},
    Status.FINISHED: set(),
}


class Request:
    """What both plan and settle need of a request, seated or not. Counters of seated ones are in the seat columns.

    limit: tokens, prompt included, at which it is finished by length; added: when it came, seconds of some clock.
    Raises InputError if the token ids are not int32.
    """

    __slots__ = (
        "adapter",
        "added",
        "constraint",
        "extra_key",
        "final_only",
        "first_scheduled",
        "hashes",
        "id",
        "life",
        "limit",
        "num_cached",
        "num_preemptions",
        "num_prompt",
        "num_reported",
        "num_unseen",
        "pooled",
        "prompt_logprobs",
        "rank",
        "repeats",
        "repetition",
        "seat",
        "seated_at",
        "spec",
        "status",
        "stops",
        "tokens",
    )

    def __init__(self, spec: EngineRequest, rank: Rank, limit: int, added: float = 0.0) -> None:
        ids = spec.token_ids
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1:
            raise InputError(f"request {spec.id!r}: prompt token ids must be an array of int32", "prompt")
        self.tokens = array("i")  # known ones: the prompt, then the output as it is read
        self.tokens.frombytes(ids.view(np.uint8).data)
        self.num_prompt = len(self.tokens)
        try:
            given = array("i", spec.given)
        except (TypeError, OverflowError):
            raise InputError(f"request {spec.id!r}: the tokens given must be int32 integers", "prompt") from None
        self.spec = spec
        self.id = spec.id
        self.rank = rank
        self.limit = limit
        self.status = Status.WAITING
        self.seat = 0  # 0: none
        self.adapter = 0  # the slot of its adapter while it has a seat; 0: none
        self.seated_at = 0  # steps that had been settled then
        self.num_unseen = 0  # steps that sample for it and were not read when it lost its seat; first they must be
        # Leading tokens that outputs have reported (kept only if final_only).
        self.num_reported = self.num_prompt + len(spec.given)
        self.num_cached = 0
        self.num_preemptions = 0
        self.added = added
        self.life: list[LifeEvent] | None = None  # if somebody follows it
        self.first_scheduled = 0.0  # time.time(); 0: not yet
        self.hashes: list[bytes] = []
        self.extra_key = extra_key(spec.lora.key if spec.lora else None, spec.cache_salt, spec.media_hashes)
        self.stops = frozenset(spec.stop_token_ids)
        self.constraint: ConstraintState | None = None
        repetition = spec.params.repetition_detection
        self.repetition = RepetitionDetector(repetition) if repetition and repetition.max_pattern_size else None
        self.repeats = False  # the last token completed a repetition that is to be ended
        if self.repetition is None:
            self.tokens.extend(given)
        else:
            for token in given:
                self.tokens.append(token)
                self.repetition.advance(self.tokens, self.num_prompt)
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pooled: list[np.ndarray] = []  # vectors of its chunks so far
        params = spec.params
        # Nobody looks at the tokens before the end: they are told in few outputs, for the end and for whoever has to go
        # on with the answer should this engine die.
        self.final_only = (
            params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop and params.logprobs is None
        )

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def due(self) -> int:
        """Number of tokens, prompt included, at which there is more to tell than the last of them."""
        return min(self.limit, self.num_reported + REPORT_TOKENS) if self.final_only else self.limit

    @property
    def is_first(self) -> bool:
        """Whether its last token is the first that was sampled here."""
        return len(self.tokens) == self.num_prompt + len(self.spec.given) + 1

    def bind(self, constraint: ConstraintState) -> None:
        """From now on it is followed, the answer so far included."""
        for token in self.spec.given:
            constraint.advance(token)
        self.constraint = constraint

    @property
    def is_followed(self) -> bool:
        """Whether each of its tokens must be looked at."""
        return self.constraint is not None or self.repetition is not None

    @property
    def may_draft(self) -> bool:
        """A constraint's masks are made for the one token that comes next."""
        return self.constraint is None

    def advance(self) -> bool:
        """Take in the last token. Returns whether it may end the request."""
        if self.is_finished:
            return False
        ends = self.constraint is not None and self.constraint.advance(self.tokens[-1])
        self.repeats = self.repetition is not None and self.repetition.advance(self.tokens, self.num_prompt)
        return ends or self.repeats

    @property
    def lacks_prompt_logprobs(self) -> bool:
        wanted = self.spec.params.prompt_logprobs is not None and not self.spec.given  # else they were told
        return wanted and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def max_cached(self) -> int:
        """Most tokens it may take from the prefix cache: one must be computed, and so must those whose logits count."""
        if self.spec.params.skip_reading_prefix_cache:
            return 0
        if self.lacks_prompt_logprobs:
            return len(self.prompt_logprobs)
        return len(self.tokens) - 1

    def note(self, what: str, first: int, last: int = 0) -> None:
        """An event of its life, if somebody follows it."""
        if self.life is not None and len(self.life) < MAX_EVENTS:
            self.life.append(LifeEvent(time.time(), what, first, last))

    def become(self, status: Status) -> None:
        if status not in _LEGAL[self.status]:
            raise RuntimeError(f"request {self.id!r} cannot go from {self.status.name} to {status.name}")
        self.status = status

    def admit(self, num_computed: int, *, with_history: bool = False) -> Admit:
        """What the worker must know to seat it. with_history: the tokens computed too, for no cache holds them."""
        spec, history = self.spec, None
        if with_history and num_computed:
            history = np.array(self.tokens[:num_computed], np.int32)
        return Admit(
            self.seat, num_computed, self.num_prompt, spec.params, spec.stop_token_ids, spec.seed, history, self.limit,
            self.may_draft, self.adapter,
        )  # fmt: skip
