"""Admission: who fits into seats and blocks, and who yields to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.kv.manager import Hit
from quire.scheduling.request import Rank, Request
from quire.scheduling.state import Chunk, State


class Admission:
    """Decides over the seats and blocks of `state`; to yield is to be preempted."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._kv = state.kv

    def find_fit(self, request: Request) -> tuple[Hit, int] | None:
        """The cached beginning of a waiting request if all its tokens find room now, else None.

        Beside running requests there must be room for what they still have to catch up and for one more block each,
        so that who comes in does not throw out another, or itself, a moment later.
        """
        if request.num_unseen:
            return None
        kv, state = self._kv, self._state
        hit, num_cached = kv.find_cached(request, request.max_cached)
        needed = kv.num_needed(len(request.tokens), hit)
        if state.running:
            needed += len(state.running) * len(kv.groups)
            needed += sum(kv.num_missing(other, len(other.tokens)) for other in state.prefilling.values())
        return (hit, num_cached) if needed <= kv.num_free else None

    def for_one_more(self, request: Request, planned: Sequence[Chunk]) -> bool:
        """Whether `request` can compute one more token; catch-ups of worse rank that are not planned yet yield."""
        state, seats, kv = self._state, self._state.seats, self._kv
        while kv.num_short(request, int(seats.num_computed[request.seat]) + 1) > kv.num_free:
            ids = {chunk.request.id for chunk in planned}
            others = [r for r in state.prefilling.values() if r.rank > request.rank and r.id not in ids]
            if not others:
                return False
            state.preempt(max(others, key=rank))
        return True

    def victim(self) -> Request:
        """Who has to go: one that computes nothing more anyway, else the worst rank."""
        state = self._state

        def cost(request: Request) -> tuple[bool, Rank]:
            drained = request.id not in state.prefilling and not state.seats.decoding[request.seat]
            return drained, request.rank

        return max(state.running.values(), key=cost)

    def make_for_urgent(self) -> None:
        """If the best waiting request lacks a seat or blocks, requests of lower priority yield to it."""
        state, kv = self._state, self._kv
        urgent = state.queue.peek()
        if urgent is None or urgent.num_unseen:
            return
        lower = sorted((r for r in state.running.values() if r.rank[0] > urgent.rank[0]), key=rank)
        nothing: Hit = [[] for _ in kv.groups]
        if not self._can_have_slot(urgent, lower):
            return
        while lower and not (
            state.seats.num_free and state.adapters.has_room(urgent.spec.lora) and self.find_fit(urgent)
        ):
            if kv.num_free + sum(kv.num_held(r) for r in lower) < kv.num_needed(len(urgent.tokens), nothing):
                return
            state.preempt(lower.pop())

    def _can_have_slot(self, urgent: Request, lower: Sequence[Request]) -> bool:
        """Whether its adapter has room, or would if these had gone."""
        slots = self._state.adapters
        if slots.has_room(urgent.spec.lora):
            return True
        counts = Counter(request.spec.lora for request in lower if request.spec.lora is not None)
        return any(slots.is_held_by(adapter, count) for adapter, count in counts.items())

    def preempt_one(self) -> None:
        """Test mode: the request that was preempted least often goes, if it got a token since it was seated."""
        state = self._state
        candidates = [r for r in state.running.values() if state.seats.decoding[r.seat]]
        if candidates:
            state.preempt(min(candidates, key=lambda r: (r.num_preemptions, r.rank)))


def rank(request: Request) -> Rank:
    return request.rank
