"""The worker in the process of the core: nothing between them but a method call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.config.resolve import Resolved
from quire.executor.base import WORKER, FailedLaunch, StepFuture, WorkerInterface, load_worker
from quire.types.kv import WorkerReport
from quire.types.plan import StepPlan, TokenMasks


class InProcessExecutor:
    sentinels = ()

    def __init__(self, resolved: Resolved, worker: str = WORKER) -> None:
        self._resolved = resolved
        self._worker_class = worker
        self._worker: WorkerInterface | None = None

    def start(self) -> WorkerReport:
        self._worker = load_worker(self._resolved, self._worker_class)
        return self._worker.start()

    def submit(self, plan: StepPlan) -> StepFuture:
        assert self._worker is not None, "start() comes first"
        try:
            return self._worker.execute(plan)
        except Exception as error:
            return FailedLaunch(error)

    def mask(self, masks: TokenMasks) -> None:
        assert self._worker is not None, "start() comes first"
        self._worker.mask(masks)

    def call(self, method: str | Callable[..., Any], *args: Any) -> Any:
        assert self._worker is not None, "start() comes first"
        return self._worker.call(method, *args)

    def call_each(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        return [self.call(method, *args)]

    def ping(self) -> None:
        """Its process is ours."""

    def check_health(self) -> None:
        """It lives as long as we do."""

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
