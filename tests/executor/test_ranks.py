"""Several worker processes that run every plan together: one answers, all are watched."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.executor.multiproc import MultiprocExecutor
from quire.foundation.errors import ConfigError, EngineDeadError
from quire.scheduling.scheduler import Scheduler
from quire.types.plan import StepPlan
from tests.engine.echo_worker import NAME, expected, make_request, make_resolved

RANKS = 3


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> Iterator[MultiprocExecutor]:
    made = make(getattr(request, "param", {}))
    made.report = made.start()  # type: ignore[attr-defined]
    yield made
    made.shutdown()
    assert not alive(made.pids)


def make(moods: dict[str, Any]) -> MultiprocExecutor:
    return MultiprocExecutor(make_resolved(executor="mp", tensor_parallel_size=RANKS, hf_overrides=moods), NAME)


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie does not."""
    states = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [
        pid for pid, stat in states.items() if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    ]


def first_plans(executor: MultiprocExecutor, count: int) -> tuple[Scheduler, list[StepPlan]]:
    report = executor.report  # type: ignore[attr-defined]
    scheduler = Scheduler(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_blocks=report.num_blocks, groups=report.groups
    )
    scheduler.add(make_request("a", [1, 2, 3], count))
    plans = [scheduler.plan() for _ in range(count)]
    return scheduler, [plan for plan in plans if plan is not None]


def test_every_rank_runs_every_plan_and_the_first_one_answers(executor: MultiprocExecutor) -> None:
    scheduler, plans = first_plans(executor, 4)
    futures = [executor.submit(plan) for plan in plans]
    tokens = [t for plan, future in zip(plans, futures, strict=True)
              for output in scheduler.settle(plan, future.result()).each() for t in output.token_ids]  # fmt: skip
    assert tokens == expected([1, 2, 3], 4)
    answer = executor.call("hello", 1)
    assert (answer["rank"], answer["pid"], answer["args"]) == (0, executor.pid, [1])
    assert len(set(executor.pids)) == RANKS
    executor.ping()
    executor.check_health()


def test_the_report_says_what_each_rank_has(executor: MultiprocExecutor) -> None:
    (note,) = executor.report.notes  # type: ignore[attr-defined]
    assert note.startswith("tensor_parallel_size=3: rank 0 on echo, 0.00 GiB weights, 1 KV heads, ")
    assert "; rank 2 on echo" in note


@pytest.mark.parametrize("executor", [{"of_rank": {"2": {"fail_at_step": 1}}}], indirect=True)
def test_a_step_that_fails_on_one_rank_is_its_failure(executor: MultiprocExecutor) -> None:
    _, plans = first_plans(executor, 3)
    futures = [executor.submit(plan) for plan in plans]

    def use() -> None:
        while True:
            futures[-1].result()
            executor.ping()

    with pytest.raises(EngineDeadError, match=r"rank 2: step 1 failed: RuntimeError: echo was told to fail"):
        use()


LOST = {"fail_at_step": 0, "fail_with": "Connection closed by peer [127.0.0.1]"}
CAUSE = {"fail_at_step": 0, "fail_with": "out of memory"}


@pytest.mark.parametrize("executor", [{"of_rank": {"0": LOST, "1": LOST, "2": CAUSE}}], indirect=True)
def test_what_others_say_of_a_failure_is_not_its_cause(executor: MultiprocExecutor) -> None:
    _, plans = first_plans(executor, 1)
    future = executor.submit(plans[0])
    with pytest.raises(EngineDeadError, match="rank 2: step 0 failed: RuntimeError: out of memory"):
        future.result()


@pytest.mark.parametrize("executor", [{"step_seconds": 30}], indirect=True)
def test_a_killed_rank_ends_all(executor: MultiprocExecutor) -> None:
    _, plans = first_plans(executor, 1)
    future = executor.submit(plans[0])
    os.kill(executor.pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"the worker process of rank 1 \(pid \d+\) was killed by SIGKILL"):
        future.result()  # long before the step would be done
    with pytest.raises(EngineDeadError, match="rank 1"):
        executor.check_health()
    executor.shutdown()


def test_any_rank_wakes_who_sleeps_until_one_is_gone(executor: MultiprocExecutor) -> None:
    os.kill(executor.pids[2], signal.SIGKILL)

    assert select.select(list(executor.sentinels), [], [], 30)[0]


@pytest.mark.parametrize("executor", [{"step_seconds": 30}], indirect=True)
@pytest.mark.parametrize("asked", ["a step", "a sign of life"])
def test_a_rank_that_hangs_ends_all(executor: MultiprocExecutor, asked: str) -> None:
    """It is there, and does nothing: no lifeline tells."""
    _, plans = first_plans(executor, 1)
    future = executor.submit(plans[0])
    os.kill(executor.pids[2], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"rank 2 \(pid \d+\) hangs: it was stopped by a signal"):
        future.result() if asked == "a step" else executor.ping()
    pids = executor.pids
    executor.shutdown()
    assert not alive(pids)


def test_a_short_stop_is_forgiven(executor: MultiprocExecutor) -> None:
    os.kill(executor.pids[2], signal.SIGSTOP)
    os.kill(executor.pids[2], signal.SIGCONT)
    executor.ping()


def test_the_first_refusal_is_told_with_its_rank_and_all_are_gone() -> None:
    made = make({"of_rank": {"1": {"refuse": "ConfigError"}}})
    with pytest.raises(ConfigError, match=r"rank 1: echo refuses"):
        made.start()
    assert not alive(made.pids)
    made.shutdown()
