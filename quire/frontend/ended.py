"""The latest requests that have ended, kept while somebody looks at them (the dashboard of a server)."""

from __future__ import annotations

import time
from collections import deque
from typing import Generic, Protocol, TypeVar

MAX_REQUESTS = 512
MAX_TOKENS = 1 << 20  # of all of them together


class EndedRequest(Protocol):
    """What must be known of one."""

    request_id: str

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...


Request = TypeVar("Request", bound=EndedRequest)


class Ended(Generic[Request]):
    """Keeps nothing unless `watch` was called lately."""

    def __init__(self) -> None:
        self._until = 0.0  # time.monotonic()
        self._kept: deque[Request] = deque()
        self._num_tokens = 0

    def watch(self, seconds: float) -> None:
        """From now on, for so long."""
        self._until = time.monotonic() + seconds

    def keep(self, state: Request) -> None:
        if time.monotonic() >= self._until:
            if self._kept:
                self._kept.clear()
                self._num_tokens = 0
            return
        self._kept.append(state)
        self._num_tokens += _size(state)
        while len(self._kept) > MAX_REQUESTS or self._num_tokens > MAX_TOKENS:
            self._num_tokens -= _size(self._kept.popleft())

    def find(self, request_id: str) -> Request | None:
        return next((state for state in reversed(self._kept) if state.request_id == request_id), None)

    def latest(self) -> list[Request]:
        """The last to end first."""
        return list(reversed(self._kept))


def _size(state: EndedRequest) -> int:
    return state.num_prompt_tokens + state.num_output_tokens
