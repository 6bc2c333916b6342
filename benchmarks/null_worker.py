"""A worker without a model: every row gets a token, at `QUIRE_NULL_RATE` tokens a second in all. For what an engine
costs around its model."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from quire.config.resolve import Resolved
from quire.types.kv import KVGroupSpec, WorkerReport
from quire.types.plan import StepPlan, TokenMasks
from quire.types.result import StepResult

NAME = "benchmarks.null_worker:NullWorker"
NUM_BLOCKS = 100_000
FIRST_TOKEN, NUM_TOKENS = 256, 50_000  # the ids that answers go through


class NullStep:
    def __init__(self, result: StepResult, ready_at: float) -> None:
        self._result = result
        self._ready_at = ready_at

    def done(self) -> bool:
        return time.monotonic() >= self._ready_at

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        return self._result


class NullWorker:
    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self._rate = float(os.environ["QUIRE_NULL_RATE"])
        self._busy_until = 0.0

    def start(self) -> WorkerReport:
        group = KVGroupSpec("full", self._resolved.config.cache.block_size, 1, 1, 1, 4)
        return WorkerReport(
            device="none", num_blocks=NUM_BLOCKS, max_model_len=self._resolved.max_model_len, groups=[group],
            vocab_size=self._resolved.info.vocab_size, weight_bytes=0, kv_bytes=0, free_bytes=0,
            attention_backend="none", phases={"load": 0.0},
        )  # fmt: skip

    def execute(self, plan: StepPlan) -> NullStep:
        token = FIRST_TOKEN + plan.step % NUM_TOKENS
        tokens = np.where(plan.samples, token, -1).astype(np.int32)
        self._busy_until = max(self._busy_until, time.monotonic()) + int(plan.samples.sum()) / self._rate
        result = StepResult(step=plan.step, tokens=tokens.reshape(-1, 1), counts=plan.samples.astype(np.int32))
        return NullStep(result, self._busy_until)

    def mask(self, masks: TokenMasks) -> None:
        raise NotImplementedError

    def call(self, method: str, *args: Any) -> Any:
        raise NotImplementedError(method)

    def shutdown(self) -> None:
        pass
