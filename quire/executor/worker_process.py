"""Main of a worker process: one thread launches plans as they come, another sends results as they get ready."""

from __future__ import annotations

import sys
import threading
from queue import SimpleQueue

from quire.executor.base import FailedLaunch, StepFuture, WorkerInterface, failed_step, load_worker
from quire.executor.messages import (
    PING,
    Mask,
    Ran,
    RunStep,
    Started,
    StartWorker,
    StopWorker,
    ToWorker,
    WorkerCall,
    WorkerReply,
)
from quire.foundation.bytecode import keep_bytecode
from quire.foundation.child import Failure, Parent, leave
from quire.foundation.errors import QuireError
from quire.foundation.heap import imports_that_stay, settle_heap
from quire.foundation.log import get_logger, setup
from quire.foundation.wire import Channel
from quire.types.plan import StepPlan
from quire.types.ranks import Rank

_LINGER = 2.0  # seconds for the last messages to leave
_log = get_logger(__name__)


def main(arguments: list[str]) -> int:
    return serve(Parent(arguments, ToWorker))


def serve(parent: Parent[ToWorker]) -> int:
    """Be one rank's worker until told to stop. Returns the exit code."""
    keep_bytecode("torch")
    try:
        start = _next(parent)
        assert isinstance(start, StartWorker)
        worker = _start(parent, start)
        if worker is None:
            return 2
        _serve(parent, worker, start.rank)
        worker.shutdown()
        return 0
    finally:
        parent.channel.close(_LINGER)


def _start(parent: Parent[ToWorker], start: StartWorker) -> WorkerInterface | None:
    setup(start.resolved.config.observe.log_level)
    try:
        with imports_that_stay():
            worker = load_worker(start.resolved, start.worker, start.rank)
        report = worker.start()
    except Exception as error:
        if not isinstance(error, QuireError):
            _log.exception("the worker could not start")
        parent.channel.send(Failure.of(error))
        return None
    parent.channel.send(Started(report))
    settle_heap()
    return worker


def _serve(parent: Parent[ToWorker], worker: WorkerInterface, rank: Rank) -> None:
    launched: SimpleQueue[tuple[int, StepFuture] | None] = SimpleQueue()
    sender = threading.Thread(target=_send_results, args=(parent.channel, launched, rank), name="results")
    sender.start()
    awaiting: tuple[int, StepFuture] | None = None  # the step that samples when its masks are here
    while True:
        message = _next(parent)
        if isinstance(message, RunStep):
            step = message.plan.step, _launch(worker, message.plan)
            if message.plan.awaits_masks and rank.samples:
                awaiting = step
            else:
                launched.put(step)
        elif isinstance(message, Mask):
            worker.mask(message.masks)
            launched.put(awaiting)
        elif isinstance(message, WorkerCall):
            parent.channel.send(_call(worker, message))
        elif isinstance(message, StopWorker):
            break
    launched.put(None)
    sender.join()


def _next(parent: Parent[ToWorker]) -> ToWorker:
    while (message := parent.receive()) is None:
        pass
    return message


def _launch(worker: WorkerInterface, plan: StepPlan) -> StepFuture:
    try:
        return worker.execute(plan)
    except Exception as error:
        return FailedLaunch(error)


def _send_results(channel: Channel[ToWorker], launched: SimpleQueue[tuple[int, StepFuture] | None], rank: Rank) -> None:
    """Of the rank that samples; the others have only failures to tell."""
    while (item := launched.get()) is not None:
        step, future = item
        try:
            result = future.result()
        except Exception as error:
            _log.exception("step %d failed", step)
            result = failed_step(step, error)
        if rank.samples or result.error is not None:
            channel.send(Ran(result))


def _call(worker: WorkerInterface, message: WorkerCall) -> WorkerReply:
    if message.method == PING:
        return WorkerReply()
    try:
        return WorkerReply(worker.call(message.method, *message.args))
    except Exception as error:
        return WorkerReply(failure=Failure.of(error))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
