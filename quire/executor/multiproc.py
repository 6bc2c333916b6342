"""The worker in a process of its own: plans go out, results come back in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from quire.config.resolve import Resolved
from quire.executor.base import WORKER
from quire.executor.messages import (
    PING,
    FromWorker,
    Mask,
    Ran,
    RunStep,
    Started,
    StartWorker,
    StopWorker,
    WorkerCall,
    WorkerReply,
)
from quire.foundation.child import Child, Failure
from quire.foundation.errors import EngineDeadError, InputError
from quire.types.kv import WorkerReport
from quire.types.plan import StepPlan, TokenMasks
from quire.types.result import StepResult


class MultiprocExecutor:
    """One worker process. Used by one thread."""

    def __init__(self, resolved: Resolved, worker: str = WORKER) -> None:
        self._child: Child[FromWorker] = Child("quire.executor.worker_process", FromWorker, "worker process")
        self._child.channel.send(StartWorker(resolved, worker))
        self._waiting: deque[RemoteStep] = deque()
        self._answers: deque[WorkerReply] = deque()

    @property
    def sentinel(self) -> int:
        return self._child.lifeline

    @property
    def pid(self) -> int:
        return self._child.pid

    def start(self) -> WorkerReport:
        try:
            message = self._child.receive()
            while message is None:
                message = self._child.receive()
        except BaseException:
            self._child.stop(grace=0)
            raise
        if isinstance(message, Started):
            return message.report
        self._child.stop()
        raise message.error() if isinstance(message, Failure) else _unexpected(message)

    def submit(self, plan: StepPlan) -> RemoteStep:
        step = RemoteStep(self, plan.step)
        self._child.channel.send(RunStep(plan))
        self._waiting.append(step)
        return step

    def mask(self, masks: TokenMasks) -> None:
        self._child.channel.send(Mask(masks))

    def call(self, method: str | Callable[..., Any], *args: Any) -> Any:
        if not isinstance(method, str):
            raise InputError(
                "a function cannot be sent to a worker process: name a method of the worker (memory, profile), or run "
                "the worker in this process (distributed_executor_backend=uni)",
                "method",
            )
        self._child.channel.send(WorkerCall(method, list(args)))
        while not self._answers:
            self.receive(None)
        answer = self._answers.popleft()
        if answer.failure is not None:
            raise answer.failure.error()
        return answer.value

    def ping(self) -> None:
        self.call(PING)

    def check_health(self) -> None:
        self._child.check()

    def shutdown(self) -> None:
        if self._child.is_open:
            self._child.channel.send(StopWorker())
            self._child.stop()

    def receive(self, timeout: float | None) -> None:
        """Hand out one message of the worker, waiting up to `timeout` seconds. Raises EngineDeadError if it is gone."""
        message = self._child.receive(timeout)
        if isinstance(message, Ran):
            self._waiting.popleft().finish(message.result)
        elif isinstance(message, WorkerReply):
            self._answers.append(message)
        elif message is not None:
            raise message.error() if isinstance(message, Failure) else _unexpected(message)


class RemoteStep:
    """A StepFuture that asks the executor to read on until the result is there."""

    def __init__(self, executor: MultiprocExecutor, step: int) -> None:
        self._executor = executor
        self._step = step
        self._result: StepResult | None = None

    def done(self) -> bool:
        if self._result is None:
            self._executor.receive(0)
        return self._result is not None

    def result(self) -> StepResult:
        while self._result is None:
            self._executor.receive(None)
        return self._result

    def finish(self, result: StepResult) -> None:
        if result.step != self._step:
            raise EngineDeadError(f"the worker answered step {result.step} when step {self._step} was due")
        self._result = result


def _unexpected(message: object) -> EngineDeadError:
    return EngineDeadError(f"the worker sent {type(message).__name__} out of turn")
