"""The contract between the brain and whatever runs its plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from quire.config.resolve import Resolved
from quire.config.runtime import EXECUTORS
from quire.foundation.child import Failure
from quire.foundation.registry import load
from quire.foundation.wake_gpu import wake_gpu
from quire.types.kv import WorkerReport
from quire.types.plan import StepPlan, TokenMasks
from quire.types.ranks import ALONE, Rank
from quire.types.result import StepResult

# Named, not imported: a core whose worker is another process never loads torch.
WORKER = "quire.worker.worker:Worker"


class StepFuture(Protocol):
    """The result of a submitted plan, not there yet."""

    def done(self) -> bool: ...

    def result(self) -> StepResult:
        """Wait for the result.

        Raises:
            EngineDeadError: the worker is gone.
        """
        ...


class Executor(Protocol):
    """Runs plans in order. Plans may be submitted before earlier ones have finished."""

    @property
    def sentinels(self) -> tuple[int, ...]:
        """File descriptors of which one becomes readable when a worker is gone; none if it cannot go without us."""
        ...

    def start(self) -> WorkerReport:
        """Bring the device up, load, measure, allocate, capture.

        Raises:
            ConfigError: the model cannot run here.
        """
        ...

    def submit(self, plan: StepPlan) -> StepFuture:
        """Launch a step. One that awaits masks must get them before the next step comes, and before its result is
        asked for."""
        ...

    def mask(self, masks: TokenMasks) -> None:
        """The masks that the step submitted last awaits."""
        ...

    def call(self, method: str | Callable[..., Any], *args: Any) -> Any:
        """A utility call outside the steps (profile, memory …); waits for its answer.

        A function gets the worker, if that is in this process; else InputError is raised. Of several ranks all are
        asked, and the first one answers.
        """
        ...

    def call_each(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """The same with the answers of all ranks."""
        ...

    def ping(self) -> None:
        """Wait for a sign of life of the worker, however long that takes.

        Raises:
            EngineDeadError: it is gone.
        """
        ...

    def check_health(self) -> None:
        """Nothing, if the worker is there.

        Raises:
            EngineDeadError: it is gone.
        """
        ...

    def shutdown(self) -> None: ...


class WorkerInterface(Protocol):
    """What an executor drives; `quire.worker.worker.Worker` is the real one.

    Constructed with `Resolved`, and with its `Rank` if it is one of several.
    """

    def start(self) -> WorkerReport: ...

    def execute(self, plan: StepPlan) -> StepFuture:
        """Launch a step. Does not wait for a device that can run ahead."""
        ...

    def mask(self, masks: TokenMasks) -> None:
        """Let the step that was launched last sample. What goes wrong its future tells."""
        ...

    def call(self, method: str | Callable[..., Any], *args: Any) -> Any: ...

    def shutdown(self) -> None: ...


def import_worker(resolved: Resolved, name: str, rank: Rank = ALONE) -> Callable[..., WorkerInterface]:
    """The class that `name` names. Its import loads torch; meanwhile the GPU's driver comes up."""
    if resolved.device == "cuda":
        wake_gpu(rank.place)
    worker: Callable[..., WorkerInterface] = load(name)
    return worker


def load_worker(resolved: Resolved, name: str, rank: Rank = ALONE) -> WorkerInterface:
    """The worker that `name` names, not started."""
    make = import_worker(resolved, name, rank)
    return make(resolved) if rank.size == 1 and rank.device < 0 else make(resolved, rank)


class FailedLaunch:
    """The future of a step that could not even be launched; it keeps its turn among the others."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        raise self._error


def failed_step(step: int, error: Exception) -> StepResult:
    """The result of a step that raised `error`."""
    nothing = np.empty(0, np.int32)
    return StepResult(step=step, tokens=nothing, counts=nothing, error=Failure.of(error).message)


def make_executor(resolved: Resolved, worker: str = WORKER) -> Executor:
    """The executor that `resolved` asks for, around the worker class that `worker` names; not started yet."""
    executor: Executor = EXECUTORS.get(resolved.executor)(resolved, worker)
    return executor
