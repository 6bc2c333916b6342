"""A server behind the router, as far as the router knows it."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

from quire.config.route import RouteConfig
from quire.foundation.errors import ConfigError
from quire.router.upstream import Pool

LONGEST_BREAK = 8.0  # seconds


def check_url(url: str) -> str:
    """http://HOST:PORT as it is kept. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query or parts.username:
        raise ConfigError(f"backend must be http://HOST:PORT, got {url!r}", "backend")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port or 80}"


class Breaker:
    """Closed: requests come. Open after some failures in a row; what opened it must be tried by a probe first."""

    def __init__(self, most_failures: int, seconds: float) -> None:
        self._most, self._first = most_failures, seconds
        self._num_failures = 0
        self._seconds = seconds
        self._until = 0.0
        self.is_open = False

    def fail(self, *, at_once: bool = False) -> None:
        """at_once: there is nothing to doubt."""
        self._num_failures += 1
        if self._num_failures < self._most and not at_once:
            return
        if self.is_open:
            if time.monotonic() < self._until:
                return
            self._seconds = min(2 * self._seconds, LONGEST_BREAK)
        self.is_open = True
        self._until = time.monotonic() + self._seconds

    def succeed(self) -> None:
        self._num_failures = 0
        self._seconds = self._first
        self.is_open = False

    @property
    def may_probe(self) -> bool:
        return not self.is_open or time.monotonic() >= self._until


class Backend:
    """url: as `check_url` has it. source: whom it was found by; None: the command line, or an operator."""

    def __init__(self, url: str, config: RouteConfig, source: str | None = None) -> None:
        parts = urlsplit(url)
        self.url = url
        self.source = source
        self.host_header = parts.netloc.encode()
        self.pool = Pool(parts.hostname or "", parts.port or 80, config.connect_timeout)
        self.breaker = Breaker(config.breaker_failures, config.breaker_seconds)
        self.in_flight = 0
        self.others = 0  # requests that it has besides, by its own count
        self.is_ready = False  # it said so
        self.is_draining = False  # an operator wants it to get nothing new
        self.is_removed = False  # … and forgets it once it has answered all
        self.models: list[dict[str, object]] = []
        self.has_other_models = False  # than these, as an answer says
        self.num_requests = 0
        self.num_failures = 0

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.is_draining and not self.breaker.is_open

    @property
    def load(self) -> int:
        return self.in_flight + self.others

    @property
    def model_ids(self) -> list[str]:
        return [str(model.get("id")) for model in self.models]

    def described(self) -> dict[str, object]:
        """For an operator."""
        return {
            "url": self.url,
            "ready": self.is_ready,
            "draining": self.is_draining,
            "breaker": "open" if self.breaker.is_open else "closed",
            "in_flight": self.in_flight,
            "others": self.others,
            "requests": self.num_requests,
            "failures": self.num_failures,
            "models": self.model_ids,
            "source": self.source,
        }
