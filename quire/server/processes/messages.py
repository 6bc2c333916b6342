"""What a server and its front ends say to each other."""

from __future__ import annotations

import msgspec

from quire.config.engine import EngineConfig
from quire.config.resolve import Resolved
from quire.config.serve import ServeConfig
from quire.engine.messages import EngineInfo
from quire.foundation.child import Failure


class Begin(msgspec.Struct, frozen=True, tag="begin", kw_only=True):
    """Answer probes."""

    number: int
    count: int
    config: EngineConfig
    serve: ServeConfig
    keys: list[str]
    folder: str  # boards and private sockets
    listener: int  # file descriptor of the listening socket
    created: int  # Unix seconds
    answers_early: bool  # take connections before it serves: somebody must answer probes while the model loads


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """The model is known; it is being loaded."""

    resolved: Resolved


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """A core is up, the first of its number or one in the place of a dead one: join it over the sockets in `folder`."""

    core: int
    info: EngineInfo
    folder: str


class EngineDied(msgspec.Struct, frozen=True, tag="engine_died"):
    """restart_seconds: until another takes its place, probably; None: none will."""

    core: int
    cause: str
    was_killed: bool
    restart_seconds: float | None


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    at_once: bool


class Serves(msgspec.Struct, frozen=True, tag="serves"):
    """It has attached, and made its first token."""


ToFrontEnd = Begin | Prepare | Attach | EngineDied | Drain
FromFrontEnd = Serves | Failure
