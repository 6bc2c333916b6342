"""`quire route`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.config.options import AboveZero, NotNegative, Options, Positive, Seconds

POLICIES = Literal["prefix", "least_load", "round_robin"]


@dataclass(frozen=True, kw_only=True)
class RouteConfig(Options):
    backend: list[str] = field(default_factory=list)
    """Servers behind the router: http://HOST:PORT; dns://NAME:PORT for every address of a name;
    kubernetes://NAMESPACE/SERVICE:PORT for the endpoints of a service."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: NotNegative = 8080
    """Port to bind; 0: any free one (it is printed)."""
    policy: POLICIES = "prefix"
    """prefix: where most of a prompt was computed lately, as long as that pays; least_load: the fewest requests;
    round_robin: each in its turn."""
    session_header: str = "x-session-id"
    """Header whose value keeps requests on one server."""
    prefix_entries: Positive = 1 << 18
    """Beginnings of prompts that are remembered."""
    max_attempts: Positive = 3
    """Servers that a request is tried on, as long as nothing of an answer has come."""
    connect_timeout: AboveZero = 2.0
    """Seconds for a connection to a server."""
    breaker_failures: Positive = 3
    """Failures in a row after which a server gets nothing until it is healthy again."""
    breaker_seconds: AboveZero = 1.0
    """Seconds until it is asked again; each time twice as long, up to eight."""
    health_interval: AboveZero = 1.0
    """Seconds between looks at a server's /readyz and /load."""
    discovery_interval: AboveZero = 5.0
    """Seconds between looks at a name's addresses, or a service's endpoints."""
    backend_api_key: str | None = None
    """Key for the router's own questions to servers that want one. Requests carry their clients' own."""
    admin_key: str | None = None
    """Key for /router/*; None: these answer clients on this machine alone."""
    max_body_bytes: Positive = 64 * 1024 * 1024
    """Largest request body. It is kept until the answer begins."""
    shutdown_timeout: Seconds = 30.0
    """Seconds after SIGTERM in which running requests may finish."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""
