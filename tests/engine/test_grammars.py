"""Requests with constraints on their way through the core: they wait aside, are bound, and harm nobody."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine import grammars
from quire.engine.client import InProcessClient
from quire.engine.core import EngineCore
from quire.engine.in_process import LocalInbox
from quire.engine.messages import Add, News, UtilityCall, UtilityReply
from quire.executor.base import make_executor
from quire.foundation.errors import ConfigError, EngineDeadError
from quire.types.output import INVALID_REQUEST, QUEUE_FULL, EngineOutput
from quire.types.plan import StepPlan
from quire.types.request import EngineRequest
from quire.types.structured import Constraint, GrammarSpec, Thinking
from tests.engine.echo_worker import NAME, EchoWorker, expected, make_request, make_resolved
from tests.engine.test_core import ListInbox, run_all, some_requests, steps
from tests.engine.toy_service import ToyService
from tests.scheduling.toy_grammar import EOS, meaning, random_constraint


@pytest.fixture(autouse=True)
def toy_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(grammars, "GrammarService", ToyService)
    ToyService.made.clear()
    yield
    for service in ToyService.made:
        service.close()


def bound(name: str, text: str, max_tokens: int = 20, **more: Any) -> EngineRequest:
    constraint = Constraint(GrammarSpec("regex", text), **more)
    return make_request(name, [1, 2, 3], max_tokens, stop_token_ids=[EOS], eos_token_id=EOS, constraint=constraint)


def answer(request: EngineRequest) -> list[int]:
    """What it must become."""
    stops = request.stop_token_ids
    if request.constraint is None:
        return expected(request.token_ids, request.max_tokens, stops)
    return expected(request.token_ids, request.max_tokens, stops, partial(meaning, request.constraint, stops=stops))


def make_core(depth: int = 2, **options: Any) -> EngineCore:
    resolved = make_resolved(depth=depth, **options)
    core = EngineCore(resolved, make_executor(resolved, NAME))
    core.start()
    return core


def tokens_of(outputs: list[EngineOutput], name: str) -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.token_ids]


def turns(core: EngineCore, *messages: Any) -> list[EngineOutput]:
    """A turn, and more until nothing can be done."""
    inbox, outputs = ListInbox(*messages), []
    for message in core.turn(inbox, 0):
        outputs += message.outputs.each() if isinstance(message, News) else []
    while core.has_work:
        for message in core.turn(inbox, 0):
            outputs += message.outputs.each() if isinstance(message, News) else []
    return outputs


@pytest.mark.parametrize(("executor", "depth"), [("uni", 1), ("uni", 2), ("uni", 3), ("mp", 2)])
@pytest.mark.parametrize(
    "options", [{}, {"preempt_every_step": True}, {"num_gpu_blocks_override": 24}, {"max_prefill_chunk": 7}], ids=str
)
def test_bound_and_free_requests_side_by_side(executor: str, depth: int, options: dict[str, Any]) -> None:
    rng = random.Random(7)
    requests = some_requests(40)
    for number in range(0, 40, 2):
        constraint = random_constraint(rng)
        requests[number] = make_request(
            f"r{number}", requests[number].token_ids, rng.randint(1, 20), constraint=constraint,
            stop_token_ids=[EOS], eos_token_id=EOS,
        )  # fmt: skip
    client = InProcessClient(make_resolved(depth=depth, executor=executor, **options), NAME)
    tokens = run_all(client, requests)
    for request in requests:
        assert tokens[request.id] == answer(request), request
    client.call("check")
    client.shutdown()
    assert all(service.is_closed for service in ToyService.made)


def test_who_asks_for_nothing_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attachment, no mask; and beside a bound request, none from the step on that it has left."""
    plans: list[StepPlan] = []
    execute = EchoWorker.execute
    monkeypatch.setattr(EchoWorker, "execute", lambda self, plan: plans.append(plan) or execute(self, plan))
    core = make_core()
    for request in some_requests(20):
        core.add(request)
    steps(core)
    assert not any(plan.attachments for plan in plans)
    assert "mask" not in core.stats().phase_seconds
    plans.clear()
    core.add(make_request("free", [4, 5], 30))
    turns(core, Add(bound("a", "5")))
    with_masks = [plan.awaits_masks for plan in plans]
    assert with_masks == sorted(with_masks, reverse=True)
    assert 0 < sum(with_masks) <= len(answer(bound("a", "5"))) + 1  # a row may be under way when it ends
    core.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_thinking_without_a_grammar_is_bound_only_when_its_budget_may_be_spent(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StepPlan] = []
    execute = EchoWorker.execute
    monkeypatch.setattr(EchoWorker, "execute", lambda self, plan: plans.append(plan) or execute(self, plan))
    core = make_core(depth)
    request = make_request("a", [1, 2, 3], 30, constraint=Constraint(None, Thinking(end=[990, 991], max_tokens=12)))
    core.add(request)
    assert tokens_of(steps(core), "a") == answer(request)
    assert answer(request)[12:14] == [990, 991]
    awaiting = [place for place, plan in enumerate(plans) if plan.awaits_masks]
    assert awaiting == list(range(12, 14 if depth == 1 else 15))  # and one whose row turned out to be free
    core.shutdown()


def test_a_slow_grammar_holds_nobody_up_and_keeps_its_place() -> None:
    core = make_core(max_num_seqs=1)
    assert turns(core, Add(bound("slow", "slow 7"))) == []
    assert not core.has_work
    stats = core.stats()
    assert (stats.num_waiting, stats.num_running) == (1, 0)
    others = [make_request(f"r{i}", [i + 1], 5) for i in range(3)]
    inbox = ListInbox(*map(Add, others))
    core.turn(inbox, 0)  # r0 has the only seat
    ToyService.made[0].let_go()
    ended = [o.request_id for o in turns(core) if o.finish_reason]
    assert ended == ["r0", "slow", "r1", "r2"]
    core.shutdown()


def test_a_wrong_grammar_is_refused_alone() -> None:
    core = make_core()
    good = make_request("good", [1, 2], 8)
    outputs = turns(core, Add(bound("bad", "wrong")), Add(good), Add(bound("fine", "4")))
    refusal = [o for o in outputs if o.request_id == "bad"]
    assert [(o.finish_reason, o.stop_reason, o.error) for o in refusal] == [
        ("error", INVALID_REQUEST, "this grammar is wrong")
    ]
    assert tokens_of(outputs, "good") == answer(good)
    assert tokens_of(outputs, "fine") == answer(bound("fine", "4"))
    core._scheduler.check()
    core.shutdown()


def test_markers_outside_the_vocabulary_are_refused_alone() -> None:
    core = make_core()
    bad = bound("bad", "5", thinking=Thinking(end=[5000]))
    bad_too = make_request("too", [1], 5, constraint=Constraint(None, Thinking(end=[-1])))
    outputs = turns(core, Add(bad), Add(bad_too), Add(bound("fine", "4")))
    assert {o.request_id for o in outputs if o.stop_reason == INVALID_REQUEST} == {"bad", "too"}
    assert tokens_of(outputs, "fine") == answer(bound("fine", "4"))
    core._scheduler.check()
    core.shutdown()


def test_an_abort_while_the_grammar_is_compiled() -> None:
    core = make_core()
    turns(core, Add(bound("a", "slow 5")), Add(bound("b", "slow 6")))
    core.abort(["a"])
    assert core.stats().num_waiting == 1
    # The same name again, with another grammar: the first one's must not become its own.
    turns(core, Add(bound("a", "slow 9")))
    service = ToyService.made[0]
    service.let_go()
    assert turns(core) == []
    service.let_go(last=True)
    assert tokens_of(turns(core), "a") == answer(bound("a", "9"))
    core._scheduler.check()
    core.shutdown()


def test_the_end_of_an_answer_whose_grammar_is_complete() -> None:
    core = make_core()
    (request,) = requests = [bound("a", "5")]
    outputs = turns(core, *map(Add, requests))
    assert tokens_of(outputs, "a") == answer(request)
    last = outputs[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    assert last.lacks_stop_token == (answer(request)[-1] != EOS)
    (empty,) = turns(core, Add(bound("empty", "0")))
    assert (empty.token_ids, empty.finish_reason, empty.lacks_stop_token) == ([], "stop", True)
    core.shutdown()


def test_a_token_that_the_grammar_refuses_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyService, "fill", lambda *_: None)  # as if all matchers had failed
    core = make_core()
    free = make_request("free", [1, 2], 8)
    outputs = turns(core, Add(bound("a", "5")), Add(free))
    end = next(o for o in outputs if o.request_id == "a" and o.finish_reason)
    assert (end.finish_reason, end.stop_reason) == ("error", INVALID_REQUEST)
    assert "no token was left" in (end.error or "")
    assert tokens_of(outputs, "free") == answer(free)
    core.shutdown()


def test_drain_waits_for_grammars_too() -> None:
    core = make_core()
    inbox = ListInbox(Add(bound("a", "slow 5")), UtilityCall(1, "drain", []))
    messages = [message for _ in range(3) for message in core.turn(inbox, 0)]
    assert not any(isinstance(m, UtilityReply) for m in messages)
    ToyService.made[0].let_go()
    while not any(isinstance(m, UtilityReply) for m in messages):
        messages += core.turn(inbox, 0)
    assert any(o.finish_reason == "stop" for m in messages if isinstance(m, News) for o in m.outputs.each())
    core.shutdown()


def test_the_queue_limit_counts_those_who_wait_for_a_grammar() -> None:
    core = make_core(max_num_seqs=2, max_num_queued_reqs=3)
    requests = [bound(f"r{i}", "slow 5") for i in range(7)]
    refused = [o.request_id for o in turns(core, *map(Add, requests)) if o.stop_reason == QUEUE_FULL]
    assert refused == ["r5", "r6"]  # there are seats for 2, and 3 may wait
    core.shutdown()


def test_a_sleeping_core_is_woken_by_a_grammar() -> None:
    core, inbox = make_core(), LocalInbox()
    inbox.put(Add(bound("a", "slow 5")))
    core.turn(inbox, 0)
    threading.Timer(0.2, ToyService.made[0].let_go).start()
    messages = core.turn(inbox, 30)  # not polled: it sleeps until the grammar is there
    assert core.has_work or messages
    core.shutdown()
    inbox.close()


def test_shutdown_while_a_grammar_is_compiled() -> None:
    client = InProcessClient(make_resolved(), NAME)
    client.add(bound("a", "slow 5"))
    client.poll(0)
    client.shutdown()
    assert ToyService.made[0].is_closed
    with pytest.raises(EngineDeadError):
        client.poll(0)


def test_grammars_get_ready_once_the_engine_is_idle() -> None:
    """Not while it starts, nor while it works; a request that comes sooner has them made at once."""
    core = make_core()
    assert ToyService.made == []
    turns(core, Add(make_request("free", [1, 2, 3], 5)))
    assert ToyService.made == []
    inbox = ListInbox()
    for _ in range(5):
        core.turn(inbox, 0)
    assert len(ToyService.made) == 1
    assert ToyService.made[0].arguments[-1] == "llguidance"
    core.shutdown()
    core = make_core(structured_outputs_config={"backend": "xgrammar"})
    turns(core, Add(bound("a", "5")))
    assert len(ToyService.made) == 2
    assert ToyService.made[1].arguments[-1] == "xgrammar"
    core.shutdown()


@pytest.mark.parametrize("given", [{"backend": "outlines"}, {"backend": 5}, {"reasoning": True}])
def test_options_of_grammars_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="structured_outputs_config"):
        EngineConfig.from_flat(structured_outputs_config=given)
