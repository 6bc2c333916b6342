"""What a client and a core say to each other: the same words in one process and between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.config.resolve import Resolved
from quire.foundation.child import Failure
from quire.types.kv import WorkerReport
from quire.types.output import ABORTED, EngineOutputs, EngineStats
from quire.types.request import EngineRequest


@dataclass(frozen=True)
class EngineInfo:
    """What the front end must know of a started engine."""

    resolved: Resolved
    report: WorkerReport

    @property
    def max_model_len(self) -> int:
        return self.report.max_model_len


class StartCore(msgspec.Struct, frozen=True, tag="start"):
    resolved: Resolved
    worker: str  # dotted name of the worker class
    before: EngineStats | None = None  # the last report of the engine whose place it takes


class Add(msgspec.Struct, frozen=True, tag="add", omit_defaults=True):
    """again: it was let in before, by an engine that is no more. suspect: several such ended while they had it."""

    request: EngineRequest
    again: bool = False
    suspect: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort", omit_defaults=True):
    ids: list[str]
    reason: str = ABORTED  # what these requests have ended with, for the log


class UtilityCall(msgspec.Struct, frozen=True, tag="call"):
    number: int
    method: str
    args: list[Any]


class StopCore(msgspec.Struct, frozen=True, tag="stop"):
    pass


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Another process is a client from now on, over the sockets in `folder`."""

    client: int
    folder: str


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """It is gone: what it had asked for is aborted."""

    client: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: EngineInfo


class News(msgspec.Struct, frozen=True, tag="news"):
    """The outputs of a step."""

    outputs: EngineOutputs


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """No output of these requests follows."""

    ids: list[str]


class Trial(msgspec.Struct, frozen=True, tag="trial"):
    """A suspect is let in, and no other will be before it has advanced or ended."""

    id: str


class Suspects(msgspec.Struct, frozen=True, tag="suspects"):
    """The engine ends, and these were in the step that raised, or in those under way."""

    ids: list[str]
    was_killed: bool  # the worker, by somebody else


class UtilityReply(msgspec.Struct, frozen=True, tag="reply", omit_defaults=True):
    """Of a call. Plain data only, also within one process."""

    number: int
    value: Any = None
    failure: Failure | None = None


ToCore = Add | Abort | UtilityCall | StopCore  # of any client
FromParent = StartCore | Join | Leave | ToCore  # of the process that started the core
FromCore = (
    Ready | News | Aborted | UtilityReply | Trial | Suspects | Failure
)  # Failure: the core has ended, or could not start
