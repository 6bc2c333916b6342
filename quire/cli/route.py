"""quire route --backend URL …"""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli import options
from quire.config.route import RouteConfig

_FLAG = "--backend"


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "route",
        "One address for many servers: each request goes where its prompt is cached and the load is light.",
        _gathered(list(arguments)),
        (RouteConfig,),
    )
    from quire.router.run import run_router

    return run_router(options.section_of(RouteConfig, values))


def _gathered(arguments: list[str]) -> list[str]:
    """--backend may be given several times, and each time name several."""
    rest: list[str] = []
    backends: list[str] = []
    into = rest
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == _FLAG:
            into = backends
            if value:
                backends.append(value)
            continue
        if argument.startswith("-"):
            into = rest
        into.append(argument)
    return [*rest, _FLAG, *backends] if backends else rest
