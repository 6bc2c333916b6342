"""Workers in processes of their own: plans go out, results come back in the same order.

One worker is one process. Ranks that share a model are as many: each gets every message, one of them tells results,
and whatever goes wrong with one of them is the end of all.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

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
from quire.foundation.wire import Channel
from quire.types.kv import WorkerReport
from quire.types.plan import StepPlan, TokenMasks
from quire.types.ranks import Rank
from quire.types.result import StepResult

# A rank whose peer is gone fails as well, in the words of the libraries that they talk through, a moment before or
# after the other's end is known: that end is the reason.
_LOST_PEER = re.compile(r"connection|peer|gloo|NCCL|socket", re.IGNORECASE)
_CAUSE_SECONDS = 0.5
_GIB = 1024**3
_LOOK_SECONDS = 0.25  # a rank that is found stopped twice ends the others


class MultiprocExecutor:
    """One worker process a rank. Used by one thread."""

    def __init__(self, resolved: Resolved, worker: str = WORKER) -> None:
        runtime = resolved.config.runtime
        stages, contexts, size = (
            runtime.pipeline_parallel_size,
            runtime.prefill_context_parallel_size,
            runtime.num_ranks,
        )
        titles = [f"worker process of rank {index}" for index in range(size)] if size > 1 else ["worker process"]
        self._children: list[Child[FromWorker]] = self._make_children(resolved, titles)
        self._channels = [child.channel for child in self._children]
        for index, channel in enumerate(self._channels):
            channel.send(StartWorker(resolved, worker, self._rank(index, size, stages, contexts)))
        self._shape = {
            "tensor_parallel_size": runtime.tensor_parallel_size,
            "pipeline_parallel_size": stages,
            "prefill_context_parallel_size": contexts,
        }
        self._teller = size - size // stages  # the rank that samples, see Rank
        self._waiting: deque[RemoteStep] = deque()
        self._answers: list[deque[WorkerReply]] = [deque() for _ in titles]
        self._has_failed, self._has_ranks = False, size > 1
        self._stopped: set[int] = set()  # ranks that were, when they were last looked at

    def _make_children(self, resolved: Resolved, titles: Sequence[str]) -> list[Child[FromWorker]]:
        """One process a rank, wherever that is. Raises EngineDeadError if one cannot be had."""
        del resolved
        return [Child("quire.executor.worker_process", FromWorker, title) for title in titles]

    def _rank(self, index: int, size: int, stages: int, contexts: int) -> Rank:
        return Rank(index, size, str(self._children[0].folder / "meeting"), stages, contexts=contexts)

    @property
    def sentinels(self) -> tuple[int, ...]:
        return tuple(child.lifeline for child in self._children)

    @property
    def pid(self) -> int:
        """Of the first rank."""
        return self._children[0].pid

    @property
    def pids(self) -> list[int]:
        """Of all ranks."""
        return [child.pid for child in self._children]

    def start(self) -> WorkerReport:
        reports: dict[int, WorkerReport] = {}
        try:
            while len(reports) < len(self._children):
                found = self._receive(None)
                if found is None:
                    continue
                index, message = found
                if not isinstance(message, Started):
                    raise self._error_of(index, message)
                reports[index] = message.report
        except BaseException:
            self._stop(grace=0)
            raise
        return _joined([reports[index] for index in range(len(reports))], self._teller, self._shape)

    def submit(self, plan: StepPlan) -> RemoteStep:
        step = RemoteStep(self, plan.step)
        Channel.send_all(self._channels, RunStep(plan))
        self._waiting.append(step)
        return step

    def mask(self, masks: TokenMasks) -> None:
        self._channels[self._teller].send(Mask(masks))  # who samples

    def call(self, method: str | Callable[..., Any], *args: Any) -> Any:
        return self.call_each(method, *args)[0]

    def call_each(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        if not isinstance(method, str):
            raise InputError(
                "a function cannot be sent to a worker process: name a method of the worker (memory, profile), or run "
                "the worker in this process (distributed_executor_backend=uni)",
                "method",
            )
        Channel.send_all(self._channels, WorkerCall(method, list(args)))
        while not all(self._answers):
            self.receive(None)
        answers = [waiting.popleft() for waiting in self._answers]
        for answer in answers:
            if answer.failure is not None:
                raise answer.failure.error()
        return [answer.value for answer in answers]

    def ping(self) -> None:
        self.call(PING)

    def check_health(self) -> None:
        for child in self._children:
            child.check()

    def shutdown(self) -> None:
        if self._children[0].is_open:
            Channel.send_all(self._channels, StopWorker())
            # Who waits for a rank that is gone, or that failed, waits for ever.
            self._stop(grace=0 if self._has_failed and len(self._children) > 1 else 5.0)

    def receive(self, timeout: float | None) -> None:
        """Hand out one message of a worker, waiting up to `timeout` seconds. Raises EngineDeadError if one is gone."""
        found = self._receive(timeout)
        if found is None:
            return
        index, message = found
        if (
            isinstance(message, Ran)
            and index == self._teller
            and (message.result.error is None or len(self._children) == 1)
        ):
            self._waiting.popleft().finish(message.result)
        elif isinstance(message, WorkerReply):
            self._answers[index].append(message)
        else:
            raise self._error_of(index, message)

    def _receive(self, timeout: float | None) -> tuple[int, FromWorker] | None:
        """A message and the rank that sent it, the first ranks first; None after `timeout` seconds.

        Raises EngineDeadError if a rank is gone and all that it sent has been read.
        """
        found = self._next()
        until = None if timeout is None else time.monotonic() + timeout
        while found is None and (until is None or time.monotonic() < until):
            left = None if until is None else until - time.monotonic()
            if self._has_ranks:
                left = _LOOK_SECONDS if left is None else min(left, _LOOK_SECONDS)
            Channel.wait_any(self._channels, left, *self.sentinels)
            found = self._next()
            if found is None:
                self._check_ranks()
            if not self._has_ranks:
                break
        if found is None:
            self._check_ranks()
        return found

    def _check_ranks(self) -> None:
        """Raises EngineDeadError if one is gone, or is stopped while others wait for it."""
        try:
            self.check_health()
            stopped = {index for index, child in enumerate(self._children) if self._has_ranks and child.is_stopped}
            before, self._stopped = self._stopped, stopped
            for index in before & stopped:
                child = self._children[index]
                raise EngineDeadError(f"the {child.title} (pid {child.pid}) hangs: it was stopped by a signal")
        except EngineDeadError:
            self._has_failed = True
            raise

    def _next(self) -> tuple[int, FromWorker] | None:
        for index, channel in enumerate(self._channels):
            message = channel.receive()
            if message is not None:
                return index, message
        return None

    def _error_of(self, index: int, message: FromWorker) -> Exception:
        """What to raise for a message that is none of those that were due."""
        self._has_failed = True
        if len(self._children) == 1:
            return message.error() if isinstance(message, Failure) else _unexpected(message)
        error = _told(index, message)
        return (_LOST_PEER.search(str(error)) and self._cause(index)) or error

    def _cause(self, index: int) -> Exception | None:
        """What ended another rank, if one has lost it."""
        others = {number: child for number, child in enumerate(self._children) if number != index}
        until = time.monotonic() + _CAUSE_SECONDS
        while (left := until - time.monotonic()) > 0 and others:
            Channel.wait_any([child.channel for child in others.values()], left, *(c.lifeline for c in others.values()))
            for number, child in list(others.items()):
                try:
                    message = child.receive(0)
                except EngineDeadError as death:
                    return death
                if message is None:
                    continue
                error = _told(number, message)
                if not _LOST_PEER.search(str(error)):
                    return error
                del others[number]
        return None

    def _stop(self, grace: float) -> None:
        for child in self._children:
            child.stop(grace)


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


def _told(index: int, message: FromWorker) -> Exception:
    if isinstance(message, Failure):
        return msgspec.structs.replace(message, message=f"rank {index}: {message.message}").error()
    if isinstance(message, Ran) and message.result.error is not None:
        return EngineDeadError(f"rank {index}: step {message.result.step} failed: {message.result.error}")
    return _unexpected(message)


def _joined(reports: list[WorkerReport], teller: int, shape: dict[str, int]) -> WorkerReport:
    """That of the rank that samples, which agreed with the others on every size, and one line on what each has.
    shape: options that say how many there are."""
    if len(reports) == 1:
        return reports[0]
    sizes = ", ".join(f"{option}={size}" for option, size in shape.items() if size > 1)
    each = "; ".join(
        f"rank {index} on {report.device}, {report.weight_bytes / _GIB:.2f} GiB weights, "
        f"{report.groups[0].num_kv_heads} KV heads, {report.kv_bytes / _GIB:.2f} GiB KV cache"
        for index, report in enumerate(reports)
    )
    return msgspec.structs.replace(reports[teller], notes=[*reports[teller].notes, f"{sizes}: {each}"])


def _unexpected(message: object) -> EngineDeadError:
    return EngineDeadError(f"the worker sent {type(message).__name__} out of turn")
