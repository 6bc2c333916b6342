"""The lives of requests that somebody follows: when they got a seat, which chunks were planned, when they lost it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from quire.scheduling.request import Request
from quire.types.view import LifeEvent

KEPT = 512  # of requests that have ended


class Lives:
    """Those are followed that come while somebody watches, and those whose spec asks for a trace. Others cost nothing
    but a look whether they are."""

    def __init__(self) -> None:
        self._until = 0.0  # time.monotonic()
        self._ended: deque[tuple[str, list[LifeEvent]]] = deque(maxlen=KEPT)

    def watch(self, seconds: float, requests: Iterable[Request]) -> None:
        """From now on and for so long. requests: those that are there already."""
        if time.monotonic() >= self._until:
            for request in requests:
                if request.life is None:
                    request.life = []
        self._until = time.monotonic() + seconds

    def begin(self, request: Request) -> None:
        if request.spec.trace is not None or time.monotonic() < self._until:
            request.life = []

    def end(self, request: Request) -> None:
        if request.life is not None and time.monotonic() < self._until:
            self._ended.append((request.id, request.life))

    def ended(self, request_id: str) -> list[LifeEvent] | None:
        """None: it is not known, or was not followed."""
        return next((life for known, life in reversed(self._ended) if known == request_id), None)
