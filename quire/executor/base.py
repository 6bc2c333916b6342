"""The contract between the brain and whatever runs its plans."""

from __future__ import annotations

from typing import Any, Protocol

from quire.types.kv import WorkerReport
from quire.types.plan import StepPlan
from quire.types.result import StepResult


class StepFuture(Protocol):
    """The result of a submitted plan, not there yet."""

    def done(self) -> bool: ...

    def result(self) -> StepResult:
        """Wait for the result. Raises EngineDeadError if the worker is gone."""
        ...


class Executor(Protocol):
    """Runs plans in order. Plans may be submitted before earlier ones have finished."""

    def start(self) -> WorkerReport:
        """Bring the device up, load, measure, allocate, capture. Raises ConfigError if the model cannot run here."""
        ...

    def submit(self, plan: StepPlan) -> StepFuture: ...

    def call(self, method: str, *args: Any) -> Any:
        """A utility call outside the steps (profile, sleep …); waits for its answer."""
        ...

    def check_health(self) -> None:
        """Raises EngineDeadError if the worker is gone."""
        ...

    def shutdown(self) -> None: ...
