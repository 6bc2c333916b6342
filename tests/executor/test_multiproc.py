"""Plans to a worker, in this process or in its own; the scheduler makes them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from quire.executor.base import EXECUTORS, make_executor
from quire.executor.in_process import InProcessExecutor
from quire.executor.multiproc import MultiprocExecutor
from quire.foundation.errors import ConfigError, EngineDeadError, QuireError
from quire.scheduling.scheduler import Scheduler
from quire.types.plan import StepPlan
from tests.engine.echo_worker import NAME, expected, make_request, make_resolved

Both = InProcessExecutor | MultiprocExecutor


@pytest.fixture(params=["uni", "mp"])
def executor(request):
    made = started(request.param)
    yield made
    made.shutdown()


def started(kind: str, **options: Any) -> Both:
    made = make_executor(make_resolved(executor=kind, **options), NAME)
    made.report = made.start()
    return made


def scheduler_for(executor: Both) -> Scheduler:
    report = executor.report
    return Scheduler(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_blocks=report.num_blocks, groups=report.groups
    )


def test_results_come_in_order_however_they_are_asked_for(executor: Both) -> None:
    scheduler = scheduler_for(executor)
    scheduler.add(make_request("a", [1, 2, 3], 4))
    plans: list[StepPlan] = []
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
    futures = [executor.submit(plan) for plan in plans]
    assert len(futures) == 4
    last = futures[-1].result()
    assert last.step == plans[-1].step
    assert all(future.done() for future in futures)
    tokens = [t for plan, future in zip(plans, futures, strict=True)
              for output in scheduler.settle(plan, future.result()).each() for t in output.token_ids]  # fmt: skip
    assert tokens == expected([1, 2, 3], 4)


def test_calls_fit_in_between(executor: Both) -> None:
    scheduler = scheduler_for(executor)
    scheduler.add(make_request("a", [1, 2, 3], 4))
    plan = scheduler.plan()
    assert plan is not None
    future = executor.submit(plan)
    assert executor.call("hello", 1)["args"] == [1]
    assert scheduler.settle(plan, future.result()).each()[0].token_ids == expected([1, 2, 3], 1)
    with pytest.raises(Exception, match="boom was called"):
        executor.call("boom")
    executor.check_health()


def test_a_step_in_another_process_is_not_waited_for() -> None:
    executor = started("mp", hf_overrides={"step_seconds": 1.0})
    scheduler = scheduler_for(executor)
    scheduler.add(make_request("a", [1], 4))
    plan, following = scheduler.plan(), scheduler.plan()
    assert plan is not None
    assert following is not None
    futures = [executor.submit(plan), executor.submit(following)]
    assert not futures[0].done()
    futures[0].result()
    assert not futures[1].done()
    assert futures[1].result().step == following.step
    executor.shutdown()


@pytest.mark.parametrize("kind", ["uni", "mp"])
def test_a_failing_step_keeps_its_turn(kind: str) -> None:
    executor = started(kind, hf_overrides={"fail_at_step": 1})
    scheduler = scheduler_for(executor)
    scheduler.add(make_request("a", [1], 4))
    plans = [scheduler.plan() for _ in range(3)]
    futures = [executor.submit(plan) for plan in plans if plan is not None]
    assert futures[0].result().error is None
    try:
        message = futures[1].result().error
    except RuntimeError as error:  # the core makes a result of it
        message = str(error)
    assert "echo was told to fail" in (message or "")
    assert futures[2].result().step == 2
    executor.shutdown()


def test_a_killed_worker_fails_what_is_waited_for() -> None:
    executor = started("mp", hf_overrides={"step_seconds": 30})
    scheduler = scheduler_for(executor)
    scheduler.add(make_request("a", [1], 4))
    plan = scheduler.plan()
    assert plan is not None
    future = executor.submit(plan)
    os.kill(executor.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"the worker process .* was killed by SIGKILL"):
        future.result()  # long before the step would be done
    with pytest.raises(EngineDeadError):
        executor.check_health()
    executor.shutdown()
    executor.shutdown()


def test_a_worker_that_breaks_at_start_says_it_in_one_line() -> None:
    executor = make_executor(make_resolved(executor="mp", hf_overrides={"refuse": "Whatever"}), NAME)
    with pytest.raises(QuireError) as caught:
        executor.start()
    assert str(caught.value) == "RuntimeError: echo refuses"
    executor.shutdown()


def test_executors_have_names() -> None:
    assert list(EXECUTORS)[:2] == ["uni", "mp"]
    with pytest.raises(ConfigError, match="unknown executor 'rey'"):
        EXECUTORS.get("rey")
