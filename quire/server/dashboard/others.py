"""What each front end of a server knows of its own requests, and the others must ask for: the core knows all requests,
but not whose they are nor what has become of those that ended."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.serve import ServeConfig
from quire.server.dashboard.life import life_of
from quire.server.dashboard.watch import EVERY, LINGER
from quire.server.http.trail import NO_KEY, Trail
from quire.server.service import Service

if TYPE_CHECKING:
    from quire.frontend.outputs import RequestState
    from quire.server.processes.peer_servers import PeerServers

MAX_ERRORS = 50
MAX_ENDED = 100
_KNOWN, _LIFE = b"/dashboard/known", b"/dashboard/life"  # between front ends only


class Known(msgspec.Struct):
    """trails: of the latest requests, by the engine's id: name of the key, route. silent: numbers of the front
    ends that gave no answer."""

    trails: dict[str, tuple[str, str]]
    ended: list[dict[str, Any]]  # the last first
    errors: list[dict[str, Any]]  # likewise
    silent: list[int] = []

    def add(self, other: Known) -> None:
        self.trails |= other.trails
        self.ended = sorted([*self.ended, *other.ended], key=lambda each: -each["finished"])[:MAX_ENDED]
        self.errors = sorted([*self.errors, *other.errors], key=lambda each: -each["time"])[:MAX_ERRORS]


class _LifeQuestion(msgspec.Struct):
    id: str
    key: str  # name of that of who asks


class Others:
    """The other front ends, if there are any. Visitors share an answer."""

    def __init__(self, service: Service, peers: PeerServers | None) -> None:
        self._service, self._peers = service, peers
        self._told: dict[int, Any] = {}
        self._asked = 0.0  # time.monotonic()
        self._lock = asyncio.Lock()

    async def known(self) -> Known:
        """By all front ends."""
        found = known_of(self._service)
        if self._peers is None:
            return found
        async with self._lock:
            if time.monotonic() - self._asked >= EVERY:
                told = await self._peers.ask_all(_KNOWN, None)
                self._told = {number: answer for number, answer in told.items() if answer is not None}
                self._asked = time.monotonic()
        for told in self._told.values():
            found.add(msgspec.convert(told, Known))
        found.silent = [number for number in self._peers.others if number not in self._told]
        return found

    async def life(self, request_id: str, key: str) -> dict[str, Any] | None:
        """Of a request, as it is shown to who has the key of this name. None: nobody knows it (any more)."""
        engine = self._service.running()
        if self._peers is not None and engine.find(request_id) is None and _trail(self._service, request_id) is None:
            told = await self._peers.ask_all(_LIFE, _LifeQuestion(request_id, key))
            if (found := next(filter(None, told.values()), None)) is not None:
                return found  # type: ignore[no-any-return]
        return await _life(self._service, request_id, key)


def answer_peers(peers: PeerServers, service: Service) -> None:
    """What the other front ends ask for their dashboards."""

    async def known(_question: None) -> Known | None:
        return None if service.engine is None else known_of(service)

    async def life(question: dict[str, str]) -> dict[str, Any] | None:
        wanted = msgspec.convert(question, _LifeQuestion)
        if service.engine is None or service.engine.find(wanted.id) is None:
            return None
        return await _life(service, wanted.id, wanted.key)

    peers.answer(_KNOWN, known)
    peers.answer(_LIFE, life)


def may_read(serve: ServeConfig, key: str, asker: str) -> bool:
    """Whether who asks with one key may read what came with another. Of a server without keys, only on its own
    machine: there everybody is the same nobody."""
    is_own_machine = serve.uds is not None or serve.host.startswith("127.") or serve.host in ("localhost", "::1")
    return key == asker and (key != NO_KEY or is_own_machine)


def known_of(service: Service) -> Known:
    """By this front end. For a while from now on it keeps requests that end."""
    engine = service.running()
    engine.keep_ended(LINGER)
    by_id = {each: trail for trail in reversed(list(service.trails)) for each in trail.engine_ids}
    trails = {each: (trail.key, trail.route) for each, trail in by_id.items()}
    errors = [_error(trail) for trail in reversed(service.trails.failed)][:MAX_ERRORS]
    return Known(trails, [_ended(each, by_id) for each in engine.latest()[:MAX_ENDED]], errors)


async def _life(service: Service, request_id: str, key: str) -> dict[str, Any] | None:
    trail = _trail(service, request_id)
    shows_text = trail is not None and may_read(service.serve, trail.key, key)
    return await life_of(service.running(), request_id, trail, shows_text=shows_text)


def _ended(ended: RequestState, trails: dict[str, Trail]) -> dict[str, Any]:
    trail, times = trails.get(ended.request_id), ended.metrics
    return {
        "id": ended.request_id,
        "key": trail.key if trail else None,
        "route": trail.route if trail else None,
        "engine": times.engine,
        "prompt": ended.num_prompt_tokens,
        "output": ended.num_output_tokens,
        "cached": ended.num_cached_tokens,
        "arrival": times.arrival_time,
        "first_token": times.first_token_time,
        "finished": times.finished_time or 0.0,
        "preemptions": times.num_preemptions,
        "reason": ended.answers[0].finish_reason,
    }


def _trail(service: Service, request_id: str) -> Trail | None:
    return service.trails.of(request_id) or service.trails.of(request_id.rsplit("#", 1)[0])


def _error(trail: Trail) -> dict[str, Any]:
    return {"time": trail.began, "error": trail.error, **trail.line()}
