"""Results leave the device on a stream of their own, into pinned memory; nobody waits until `result()` is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from quire.types.plan import StepPlan
from quire.types.result import LogprobRows, RowFailure, StepResult
from quire.worker.sampling.logprobs import LogprobTensors


class ReadyStep:
    """A result that is already on the host: of a platform that does not run ahead."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class PendingStep:
    """A result on its way from the device."""

    def __init__(self, copied: torch.cuda.Event, finish: Callable[[], StepResult]) -> None:
        self._copied = copied
        self._finish = finish

    def done(self) -> bool:
        return bool(self._copied.query())

    def result(self) -> StepResult:
        self._copied.synchronize()
        return self._finish()


StepHandle = ReadyStep | PendingStep


class Readback:
    """Copies sampled tokens (and log-probabilities) to the host.

    The device's token buffer is one and the same at every step: `before_commit` makes the compute stream wait for
    the copy of the step before, which has long been done by then.
    """

    def __init__(self, max_rows: int, stream: torch.cuda.Stream | None, slots: int = 4, columns: int = 0) -> None:
        """columns: of outcomes with drafts; 0: a row has one token."""
        self._stream = stream
        shape = (max_rows, columns) if columns else (max_rows,)
        if stream is not None:
            self._tokens = [torch.empty(shape, dtype=torch.int32, pin_memory=True) for _ in range(slots)]
            self._computed = [torch.cuda.Event() for _ in range(slots)]
            self._copied = [torch.cuda.Event() for _ in range(slots)]
        self._slot = 0

    def before_commit(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._copied[self._slot - 1])

    def start(
        self,
        plan: StepPlan,
        tokens: torch.Tensor,
        logprobs: LogprobTensors | None,
        answers: Mapping[str, LogprobTensors],
        failures: dict[int, str],
    ) -> StepHandle:
        """tokens: [rows] int32 on the device, -1 where a row did not sample, or outcomes as `kernels.drafts` has them;
        answers: of features, by the field of StepResult; failures: messages by seat."""
        failed = [
            RowFailure(row, failures[seat])
            for row, seat in enumerate(plan.seats.tolist() if failures else ())
            if seat in failures
        ]
        if self._stream is None:
            there = tokens[: plan.num_rows].cpu().numpy().copy()
            return ReadyStep(_result(plan, there, logprobs, answers, failed))
        slot, rows = self._slot, plan.num_rows
        self._slot = (slot + 1) % len(self._tokens)
        self._computed[slot].record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed[slot])
            host_tokens = self._tokens[slot][:rows]
            host_tokens.copy_(tokens[:rows], non_blocking=True)
            sampled = None if logprobs is None else _start_copy(logprobs, self._stream)
            copies = {field: _start_copy(answer, self._stream) for field, answer in answers.items()}
            self._copied[slot].record()
        return PendingStep(
            self._copied[slot], lambda: _result(plan, host_tokens.numpy().copy(), sampled, copies, failed)
        )


def _start_copy(tensors: LogprobTensors, stream: torch.cuda.Stream) -> LogprobTensors:
    def copy(source: torch.Tensor) -> torch.Tensor:
        if not source.is_cuda:
            return source
        source.record_stream(stream)  # its memory must not be reused before the copy has read it
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)

    return LogprobTensors(
        rows=copy(tensors.rows),
        counts=copy(tensors.counts),
        token_ids=copy(tensors.token_ids),
        logprobs=copy(tensors.logprobs),
        ranks=copy(tensors.ranks),
    )


def _host(tensors: LogprobTensors) -> LogprobRows:
    return LogprobRows(
        rows=tensors.rows.cpu().numpy().astype(np.int32),
        counts=tensors.counts.cpu().numpy().astype(np.int32),
        token_ids=tensors.token_ids.cpu().numpy().astype(np.int32),
        logprobs=tensors.logprobs.cpu().numpy().astype(np.float32),
        ranks=tensors.ranks.cpu().numpy().astype(np.int32),
    )


def _result(
    plan: StepPlan,
    tokens: np.ndarray,
    logprobs: LogprobTensors | None,
    answers: Mapping[str, LogprobTensors],
    failures: list[RowFailure],
) -> StepResult:
    drafted = matched = None
    if tokens.ndim == 2:
        drafted, matched = (np.ascontiguousarray(column) for column in tokens.T[-2:])
        tokens = np.ascontiguousarray(tokens[:, : 1 + plan.num_drafts])
    else:
        tokens = tokens.reshape(-1, 1)
    told: dict[str, Any] = {field: _host(answer) for field, answer in answers.items()}
    return StepResult(
        step=plan.step,
        tokens=tokens,
        counts=(tokens >= 0).sum(1, dtype=np.int32),
        drafted=drafted,
        matched=matched,
        logprobs=None if logprobs is None else _host(logprobs),
        failures=failures,
        **told,
    )
