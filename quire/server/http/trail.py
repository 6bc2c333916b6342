"""What is known of one HTTP request while it is answered and afterwards: for the access log, the counts by key, the
traces and the dashboard. One object, made at the outermost door and filled in by whoever learns something."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import Scope

from quire.types.output import RequestMetrics, Spent
from quire.types.sampling import SamplingParams

if TYPE_CHECKING:
    from quire.frontend.replies import ReplyPlan

TRAIL = "quire.trail"  # in the scope
REQUEST_ID = "quire.request_id"  # likewise, of a request that came over a connection
NO_KEY = "-"  # the name where no key was shown
KEPT = 512  # of those that have ended
MAX_ERROR = 256  # characters


class Trace(Protocol):
    """The trace of a request (`server/tracing.py`)."""

    is_recorded: bool
    names: dict[str, str]  # headers that say who it is

    def end(self, trail: Trail) -> None: ...


@dataclass(slots=True, eq=False)
class Trail:
    """Times in seconds; began: time.time()."""

    method: str
    route: str
    id: str = ""  # of the HTTP request, as its reply says it
    reply_id: str = ""
    key: str = NO_KEY
    began: float = field(default_factory=time.time)
    seconds: float = 0.0
    status: int = 0  # 0: it is being answered
    model: str = ""
    engine_ids: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queued: float | None = None  # until the first of its requests had a seat
    first_token: float | None = None  # until its first token
    encoding: tuple[float, float] | None = None  # when its prompt was rendered and encoded, time.time()
    error: str | None = None
    plan: ReplyPlan | None = None  # of a conversation: what its answers are made of
    params: SamplingParams | None = None
    trace: Trace | None = None  # if requests are traced
    times: list[RequestMetrics] = field(default_factory=list)  # of its requests, if it is traced
    parsing: Spent = field(default_factory=Spent)

    def time(self, times: RequestMetrics | None) -> None:
        """One of its requests has ended. The first counts."""
        if times is not None and self.trace is not None:
            self.times.append(times)
        if times is None or self.queued is not None or times.first_scheduled_time is None:
            return
        self.queued = times.first_scheduled_time - times.arrival_time
        if times.first_token_time is not None:
            self.first_token = times.first_token_time - self.began

    def encode(self, began: float) -> None:
        """Its prompt is encoded; began: time.time()."""
        self.encoding = (self.encoding or (began, began))[0], time.time()

    def answers_with(self, plan: ReplyPlan) -> None:
        """What its answers are made of."""
        self.plan = plan
        if self.trace is not None and self.trace.is_recorded:
            plan.spent = self.parsing

    def fail(self, message: str) -> None:
        self.error = message[:MAX_ERROR]

    def line(self) -> dict[str, Any]:
        """What the access log says of it; no text of anybody's."""
        found: dict[str, Any] = {
            "id": self.id,
            "reply": self.reply_id,
            "key": self.key,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "seconds": round(self.seconds, 4),
        }
        if self.engine_ids or self.prompt_tokens:
            found |= {"prompt": self.prompt_tokens, "cached": self.cached_tokens, "output": self.output_tokens}
        if self.queued is not None:
            found["queued"] = round(self.queued, 4)
        if self.first_token is not None:
            found["first_token"] = round(self.first_token, 4)
        return found


class Trails:
    """Those of this process: all that are open, and the latest that have ended."""

    def __init__(self) -> None:
        self._open: dict[int, Trail] = {}
        self._ended: deque[Trail] = deque(maxlen=KEPT)
        self.failed: deque[Trail] = deque(maxlen=KEPT // 8)

    def begin(self, trail: Trail) -> None:
        self._open[id(trail)] = trail

    def end(self, trail: Trail) -> None:
        del self._open[id(trail)]
        if trail.engine_ids:
            self._ended.append(trail)
        if trail.status >= 400 or trail.error is not None:
            self.failed.append(trail)

    def __iter__(self) -> Iterator[Trail]:
        """The latest first."""
        yield from reversed(list(self._open.values()))
        yield from reversed(self._ended)

    def of(self, engine_id: str) -> Trail | None:
        """That of a request as the engine knows it."""
        return next((trail for trail in self if engine_id in trail.engine_ids), None)


def trail_of(scope: Scope) -> Trail:
    """One that nobody keeps, if the request did not come through the door."""
    found: Trail | None = scope.get(TRAIL)
    if found is None:
        found = scope[TRAIL] = Trail(scope.get("method", ""), scope.get("path", ""))
    return found
