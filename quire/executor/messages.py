"""What a core and a worker process say to each other."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.config.resolve import Resolved
from quire.foundation.child import Failure
from quire.types.kv import WorkerReport
from quire.types.plan import StepPlan, TokenMasks
from quire.types.ranks import ALONE, Rank
from quire.types.result import StepResult

PING = "ping"  # a call that the worker's process answers by itself


class StartWorker(msgspec.Struct, frozen=True, tag="start"):
    resolved: Resolved
    worker: str  # dotted name of the class
    rank: Rank = ALONE


class RunStep(msgspec.Struct, frozen=True, tag="run"):
    plan: StepPlan


class Mask(msgspec.Struct, frozen=True, tag="mask"):
    """Follows a Run whose plan awaits it."""

    masks: TokenMasks


class WorkerCall(msgspec.Struct, frozen=True, tag="call"):
    method: str
    args: list[Any]


class StopWorker(msgspec.Struct, frozen=True, tag="stop"):
    pass


class Started(msgspec.Struct, frozen=True, tag="started"):
    report: WorkerReport


class Ran(msgspec.Struct, frozen=True, tag="ran"):
    result: StepResult


class WorkerReply(msgspec.Struct, frozen=True, tag="answer"):
    value: Any = None
    failure: Failure | None = None


ToWorker = StartWorker | RunStep | Mask | WorkerCall | StopWorker
FromWorker = Started | Ran | WorkerReply | Failure
