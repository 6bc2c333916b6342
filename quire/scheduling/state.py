"""State: what plan writes and settle reads, and the few moves both make (seat, unseat, preempt, finish)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.kv.manager import Hit, KVManager
from quire.scheduling.adapters import AdapterSlots
from quire.scheduling.drafting import Drafting
from quire.scheduling.lives import Lives
from quire.scheduling.load import Load
from quire.scheduling.queue import WaitingQueue
from quire.scheduling.request import Request, Status
from quire.scheduling.seats import DecodeRows, HostSeats
from quire.types.plan import StepPlan
from quire.types.view import ENDED, PREEMPTED, SEATED


class Chunk(NamedTuple):
    """A catch-up row: KV of tokens [start, end) of a request; the last known token's logits are sampled."""

    request: Request
    start: int
    end: int
    samples: bool


@dataclass(slots=True)
class PlannedStep:
    """A plan whose result is awaited, with what settling it takes."""

    plan: StepPlan
    decodes: DecodeRows
    chunks: list[Chunk]
    bound: list[tuple[int, Request]]  # (plan row, request) of the masks that it still awaits
    is_full: bool = False  # of prompts: it leaves some behind that lack nothing else
    left: set[int] = field(default_factory=set)  # seats that were given back since the plan was built

    def samples(self, request: Request) -> bool:
        """Whether it brings a token, or several, of a request that has kept its seat."""
        if request.seat in self.left:
            return False
        return bool((self.decodes.seats == request.seat).any()) or any(
            chunk.request is request and chunk.samples for chunk in self.chunks
        )


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0


class State:
    def __init__(self, kv: KVManager, max_seats: int, drafting: Drafting | None = None, adapter_slots: int = 0) -> None:
        self.kv = kv
        self.drafting = drafting  # None: nobody drafts
        self.seats = HostSeats(max_seats, len(kv.groups))
        self.queue = WaitingQueue()
        self.adapters = AdapterSlots(adapter_slots)
        self._max_seats = max_seats
        self._num_passed = 0  # requests seated before a better one that stands aside
        self.num_compiling = 0  # requests that wait for their grammar, and in no queue
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.running: dict[str, Request] = {}  # those with a seat
        self.prefilling: dict[str, Request] = {}  # those of them that still catch up
        self.in_flight: deque[PlannedStep] = deque()  # oldest first
        self.releases: list[int] = []  # seats given back since the last plan
        self.totals = Totals()
        self.load = Load()
        self.lives = Lives()

    def seat(self, request: Request, hit: Hit, num_cached: int) -> None:
        """A waiting request takes a seat and the cached blocks of its beginning."""
        request.become(Status.RUNNING)
        request.note(SEATED, num_cached, len(request.tokens))
        self.kv.admit(request, hit, num_cached)
        request.adapter = self._take_adapter(request)
        self.seats.take(request, num_cached, self.kv.room(request))
        self.load.seat(request)
        if self.drafting is not None:
            self.drafting.forget(request.seat)
        self.running[request.id] = request
        self.prefilling[request.id] = request

    def _take_adapter(self, request: Request) -> int:
        """Its slot. Who stands aside for long gets the next that falls free."""
        adapter = request.spec.lora
        if adapter is not None:
            self.queue.bring_back(adapter.key)
        aside = self.queue.first_aside()
        if aside is not None and aside.rank < request.rank:
            self._num_passed += 1
            if self._num_passed >= self._max_seats:
                self.adapters.close_one()
        return self.adapters.take(adapter)

    def preempt(self, request: Request) -> None:
        """Take its seat and blocks; it goes on later from its tokens, those in flight included."""
        if request.id not in self.prefilling:
            request.num_unseen = sum(step.samples(request) for step in self.in_flight)
        self._unseat(request)
        request.become(Status.PREEMPTED)
        request.num_preemptions += 1
        self.totals.num_preemptions += 1
        request.note(PREEMPTED, len(request.tokens))
        self.queue.push(request)

    def finish(self, request: Request) -> None:
        """It ends here; results of it still in flight are dropped when they come."""
        before = request.status
        if before is Status.RUNNING:
            self._unseat(request)
        request.become(Status.FINISHED)
        request.note(ENDED, len(request.tokens))
        self.lives.end(request)
        del self.requests[request.id]
        if before is Status.COMPILING:
            self.num_compiling -= 1
        elif before is not Status.RUNNING:
            self.queue.forget(request)

    def _unseat(self, request: Request) -> None:
        self.kv.register(request, min(len(request.tokens), int(self.seats.num_computed[request.seat])))
        # Steps in flight may still write to these blocks; whoever gets them writes later, on the same stream.
        self.kv.free(request)
        seat = self.seats.give_back(request)
        request.adapter = 0
        if self.adapters.give_back(request.spec.lora) and (best := self.queue.first_aside()) is not None:
            assert best.spec.lora is not None
            self.queue.bring_back(best.spec.lora.key)
            self._num_passed = 0
        self.load.unseat(request)
        self.releases.append(seat)
        del self.running[request.id]
        self.prefilling.pop(request.id, None)
        for step in self.in_flight:
            step.left.add(seat)

    def check(self) -> None:
        """Raise AssertionError if requests, seats and counters contradict each other."""
        self.seats.check()
        assert self.seats.num_used == len(self.running), "seats and running requests do not match"
        for request in self.requests.values():
            running = request.status is Status.RUNNING
            assert running == (request.id in self.running), f"{request.id}: {request.status.name}, but listed otherwise"
            assert running == (request.seat != 0), f"{request.id} is {request.status.name} and has seat {request.seat}"
            if running:
                seat, seats = request.seat, self.seats
                assert seats.requests[seat] is request, f"seat {seat} belongs to two requests"
                assert seats.num_seen[seat] == len(request.tokens), f"{request.id}: tokens and seen count differ"
                assert (seats.num_computed[seat] <= seats.room[:, seat]).all(), f"{request.id} outgrew its blocks"
                assert seats.num_computed[seat] < request.limit, f"{request.id} outran its limit"
                room = self.kv.room(request)
                assert seats.room[:, seat].tolist() == room, f"{request.id}: its tables hold {room} tokens"
                least = seats.num_computed[seat] if self.drafting is None else seats.least[seat]
                drained = request.id not in self.prefilling and least + 1 >= request.limit
                phases = (request.id in self.prefilling, bool(seats.decoding[seat]), bool(drained))
                assert sum(phases) == 1, f"{request.id}: prefilling, decoding, drained = {phases}"
        self.adapters.check([r.spec.lora for r in self.running.values() if r.spec.lora is not None])
        compiling = sum(request.status is Status.COMPILING for request in self.requests.values())
        assert compiling == self.num_compiling, "requests that wait for their grammar are miscounted"
        waiting = len(self.requests) - len(self.running) - compiling
        assert len(self.queue) == waiting, f"{waiting} requests wait, {len(self.queue)} are queued"
