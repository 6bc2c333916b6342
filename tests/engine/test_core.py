"""The loop, with the real scheduler and a worker that would notice every wrong seat, block, count or token."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from quire.engine.client import InProcessClient
from quire.engine.core import EngineCore
from quire.engine.messages import Abort, Add, FromCore, News, Suspects, UtilityCall, UtilityReply
from quire.executor.in_process import InProcessExecutor
from quire.foundation.child import Failure
from quire.foundation.errors import ConfigError, EngineDeadError, InputError
from quire.types.output import DRAINING, INVALID_REQUEST, QUEUE_FULL, EngineOutput, EngineStats
from quire.types.request import EngineRequest
from quire.types.sampling import RequestOutputKind
from tests.engine.echo_worker import NAME, expected, make_request, make_resolved


def some_requests(count: int, seed: int = 0) -> list[EngineRequest]:
    rng = random.Random(seed)
    shared = [rng.randrange(900) for _ in range(50)]
    return [
        make_request(f"r{i}", shared[: rng.randrange(50)] + [rng.randrange(900) for _ in range(rng.randrange(1, 40))],
                     rng.randrange(1, 30), stop_token_ids=[rng.randrange(997) for _ in range(20)])
        for i in range(count)
    ]  # fmt: skip


def run_all(client: InProcessClient, requests: Iterable[EngineRequest]) -> dict[str, list[int]]:
    requests = list(requests)
    for request in requests:
        client.add(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    unfinished = set(tokens)
    while unfinished:
        for output in client.poll(5).each():
            assert output.error is None, output
            tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                unfinished.remove(output.request_id)
    return tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("options", [
    {}, {"preempt_every_step": True}, {"num_gpu_blocks_override": 24}, {"enable_prefix_caching": False},
    {"max_prefill_chunk": 7},
], ids=str)  # fmt: skip
def test_every_depth_gives_the_right_tokens(depth: int, options: dict[str, Any]) -> None:
    client = InProcessClient(make_resolved(depth=depth, **options), NAME)
    requests = some_requests(40)
    tokens = run_all(client, requests)
    for request in requests:
        assert tokens[request.id] == expected(request.token_ids, request.max_tokens, request.stop_token_ids)
    client.call("check")
    stats = client.stats()
    assert stats.num_running == stats.num_waiting == stats.num_seats_used == 0
    assert stats.num_free_blocks == stats.num_blocks
    client.shutdown()


def make_core(depth: int = 2, **options: Any) -> EngineCore:
    resolved = make_resolved(depth=depth, **options)
    core = EngineCore(resolved, InProcessExecutor(resolved, NAME))
    core.start()
    return core


def steps(core: EngineCore) -> list[EngineOutput]:
    outputs = []
    while core.has_work:
        outputs += core.step().each()
    return outputs


class ListInbox:
    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)
        self.waits = 0

    def drain(self) -> list[Any]:
        taken, self.messages = self.messages, []
        return taken

    def wait(self, _timeout: float | None, *_sentinels: int) -> None:
        self.waits += 1


def test_depth_is_the_number_of_plans_in_flight() -> None:
    for depth in (1, 2, 3):
        core = make_core(depth)
        core.add(make_request("a", [1, 2, 3], 10))
        core.step()
        assert [plan.step for plan, *_ in core._in_flight] == list(range(1, depth))
        core.step()
        assert [plan.step for plan, *_ in core._in_flight] == list(range(2, depth + 1))


def test_a_request_that_can_never_run_is_refused_and_harms_nobody() -> None:
    core = make_core()
    core.add(make_request("long", [1] * 300, 5))
    core.add(make_request("good", [1, 2], 3))
    outputs = steps(core)
    refusal = next(o for o in outputs if o.request_id == "long")
    assert (refusal.finish_reason, refusal.stop_reason) == ("error", INVALID_REQUEST)
    assert "300 tokens" in (refusal.error or "")
    assert [t for o in outputs if o.request_id == "good" for t in o.token_ids] == expected([1, 2], 3)


def test_the_queue_limit_counts_those_without_a_seat() -> None:
    core = make_core(max_num_seqs=4, max_num_queued_reqs=3)
    for i in range(10):
        core.add(make_request(f"r{i}", [i + 1], 5))
    first = core.step()
    refused = [o for o in first.each() if o.stop_reason == QUEUE_FULL]
    assert [o.request_id for o in refused] == ["r7", "r8", "r9"]  # 4 get seats, 3 wait
    core.add(make_request("late", [1], 5))
    assert [o.request_id for o in core.step().each() if o.finish_reason == "error"] == ["late"]
    finished = [o.request_id for o in steps(core) if o.finish_reason == "length"]
    assert sorted(finished) == [f"r{i}" for i in range(7)]


def test_abort_frees_at_once_and_silences() -> None:
    core = make_core()
    for i in range(6):
        core.add(make_request(f"r{i}", [i + 1] * 20, 50))
    core.add(make_request("refused", [], 50))
    for _ in range(3):
        core.step()
    core.add(make_request("refused too", [], 50))
    core.abort([f"r{i}" for i in range(6)] + ["refused too", "unknown"])
    stats = core.stats()
    assert stats.num_running == 0
    assert stats.num_free_blocks == stats.num_blocks
    assert steps(core) == []
    assert not core.has_work
    core._scheduler.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_gauges_come_to_rest_after_the_last_abort(depth: int) -> None:
    core, inbox = make_core(depth), ListInbox()
    for i in range(12):
        inbox.messages.append(Add(make_request(f"r{i}", [i + 1] * 20, 50)))
    for _ in range(3):
        core.turn(inbox, 0)
    inbox.messages.append(Abort([f"r{i}" for i in range(12)]))
    told: list[EngineStats] = []
    while inbox.messages or core.has_work:
        news = [m.outputs for m in core.turn(inbox, 0) if isinstance(m, News)]
        told += [outputs.stats for outputs in news if outputs.stats is not None]
    last = told[-1]
    assert (last.num_running, last.num_waiting, last.num_seats_used, last.kv_usage) == (0, 0, 0, 0.0)
    assert core.turn(inbox, 0) == []  # once


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_ends_the_engine_which_says_whose_it_was(depth: int) -> None:
    core = make_core(depth, max_num_seqs=2, hf_overrides={"fail_at_step": 3})
    for i in range(3):
        core.add(make_request(f"r{i}", [i + 1], 50))
    inbox = ListInbox()
    messages: list[FromCore] = []
    while not core.stopped:
        messages += core.turn(inbox, 0)
    outputs = [o for m in messages if isinstance(m, News) for o in m.outputs.each()]
    assert not any(o.finish_reason for o in outputs)  # they can go on elsewhere
    assert messages[-2] == Suspects(["r0", "r1"], was_killed=False)  # r2 was not in the step
    assert isinstance(messages[-1], Failure)
    assert "step 3 failed: RuntimeError: echo was told to fail" in messages[-1].message


def test_a_scheduler_without_a_plan_ends_the_engine_instead_of_spinning(monkeypatch) -> None:
    core = make_core()
    monkeypatch.setattr(core._scheduler, "plan", lambda: None)
    messages = core.turn(ListInbox(Add(make_request("a", [1], 5))), None)
    assert core.stopped
    assert isinstance(messages[-1], Failure)
    assert "finds nothing to do" in messages[-1].message


def test_an_idle_core_waits_in_its_inbox_and_a_busy_one_does_not() -> None:
    core = make_core()
    inbox = ListInbox()
    assert core.turn(inbox, None) == []
    assert inbox.waits == 1
    inbox.messages.append(Add(make_request("a", [1], 5)))
    core.turn(inbox, None)
    assert inbox.waits == 2
    while core.has_work:
        core.turn(inbox, None)
    assert inbox.waits == 2


def test_utilities_answer_and_their_errors_stay_theirs() -> None:
    core = make_core()
    calls = [("ping", []), ("stats", []), ("check", []), ("reset_prefix_cache", []), ("worker", ["hello", 1]),
             ("worker", ["boom"]), ("nothing", [])]  # fmt: skip
    inbox = ListInbox(*(UtilityCall(i, method, args) for i, (method, args) in enumerate(calls)))
    replies = [m for m in core.turn(inbox, 0) if isinstance(m, UtilityReply)]
    assert [r.number for r in replies] == list(range(len(calls)))
    assert replies[0].value == "pong"
    assert replies[4].value["args"] == [1]
    assert replies[5].failure is not None
    assert "boom was called" in replies[5].failure.message
    assert replies[6].failure is not None
    assert isinstance(replies[6].failure.error(), InputError)
    assert not core.stopped


def test_drain_answers_when_all_is_done_and_refuses_what_is_new() -> None:
    core = make_core()
    inbox = ListInbox(Add(make_request("a", [1], 5)), UtilityCall(1, "drain", []), Add(make_request("b", [1], 5)))
    messages: list[FromCore] = []
    while not any(isinstance(m, UtilityReply) for m in messages):
        messages += core.turn(inbox, 0)
    outputs = [o for m in messages if isinstance(m, News) for o in m.outputs.each()]
    assert [o.stop_reason for o in outputs if o.request_id == "b"] == [DRAINING]
    assert outputs[-1].request_id == "a"
    assert outputs[-1].finish_reason == "length"
    assert isinstance(messages[-1], UtilityReply)


def test_statistics_count_steps_tokens_and_where_the_time_goes() -> None:
    core = make_core()
    core.add(make_request("a", [1] * 10, 5))
    reported: list[EngineStats] = []
    while core.has_work:
        stats = core.step().stats
        if stats is not None:
            reported.append(stats)
    last = reported[-1]
    assert (last.num_running, last.num_steps, last.generation_tokens, last.prompt_tokens) == (0, 5, 5, 10)
    assert sum(sum(s.step_tokens) for s in reported) == 14  # the last sampled token is never computed
    assert {"plan", "submit", "wait", "settle"} <= set(last.phase_seconds)
    assert last.last_step_time > 0


def test_requests_are_logged_by_id_and_length_if_wanted(caplog) -> None:
    for wanted in (False, True):
        caplog.clear()
        core = make_core(enable_log_requests=wanted)
        with caplog.at_level("INFO", "quire.engine.core"):
            core.add(make_request("a", [1] * 10, 5))
            steps(core)
        told = [(r.message, r.request_id) for r in caplog.records]
        assert told == ([("request came", "a"), ("request ended", "a")] if wanted else [])


@pytest.mark.parametrize("kind", ["ConfigError", "DoesNotFitError", "InputError"])
def test_a_worker_that_cannot_start_says_why(kind: str) -> None:
    with pytest.raises(Exception, match="echo refuses") as caught:
        InProcessClient(make_resolved(hf_overrides={"refuse": kind}), NAME)
    assert type(caught.value).__name__ == kind


def test_an_unknown_worker_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="Nobody"):
        InProcessClient(make_resolved(), "tests.engine.echo_worker:Nobody")


def test_a_shut_down_client_says_so() -> None:
    client = InProcessClient(make_resolved(), NAME)
    client.shutdown()
    client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.poll(0)
    with pytest.raises(EngineDeadError):
        client.add(make_request("a", [1], 1))


def held_seconds(kind: RequestOutputKind) -> float:
    core = make_core(2, hf_overrides={"step_seconds": 0.02})
    request = make_request("a", [1, 2, 3], 30)
    core.add(msgspec.structs.replace(request, params=request.params.clone(output_kind=kind)))
    while core.has_work:
        core.turn(ListInbox(), 0)
    return core.stats().phase_seconds.get("hold", 0.0)


def test_a_step_is_planned_late_while_somebody_reads_and_only_then() -> None:
    assert held_seconds(RequestOutputKind.DELTA) > 0.2  # of 0.6: who comes in a step shall not wait for the next too
    assert held_seconds(RequestOutputKind.FINAL_ONLY) == 0.0


def test_an_idle_worker_is_prepared_and_a_busy_one_is_not() -> None:
    client = InProcessClient(make_resolved(hf_overrides={"prepares": 5, "step_seconds": 0.002}), NAME)
    core = client._core
    for turn in range(3):
        core.turn(client._inbox, 0.0)
        assert core._executor._worker.left_to_prepare == 4 - turn
    requests = some_requests(10)
    tokens = run_all(client, requests)  # the worker would protest
    assert core._executor._worker.left_to_prepare == 2
    for request in requests:
        assert tokens[request.id] == expected(request.token_ids, request.max_tokens, request.stop_token_ids)
    for _ in range(4):
        core.turn(client._inbox, 0.0)
    assert core._executor._worker.left_to_prepare == 0
