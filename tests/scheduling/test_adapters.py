"""Adapters in slots: who holds one, who waits for one, and that nobody waits for ever."""

from __future__ import annotations

import msgspec

from quire.types.adapter import Adapter
from quire.types.plan import StepPlan
from tests.scheduling.simulator import make_request
from tests.scheduling.traces import ADAPTERS, Life, World

A, B, C = ADAPTERS[:3]


def add(life: Life, name: str, adapter: Adapter | None, max_tokens: int = 4, priority: int = 0) -> None:
    number = len(life.references)
    request = make_request(name, [1, 2, 3], max_tokens, number=number, stops=(), priority=priority)
    life.add(msgspec.structs.replace(request, lora=adapter))


def begin(**world: int | str) -> Life:
    return Life(World(**{"depth": 1, "num_blocks": 60, "adapter_slots": 1, **world}))  # type: ignore[arg-type]


def names(plan: StepPlan) -> list[str]:
    return [change.adapter.name for change in plan.adapters]


def test_who_has_no_slot_stands_aside_and_others_go_on() -> None:
    life = begin()
    for name, adapter in (("a", A), ("b", B), ("plain", None), ("again", A)):
        add(life, name, adapter)
    plan = life.plan()
    assert names(plan) == [A.name]
    assert [admit.adapter for admit in plan.admits] == [1, 0, 1]
    assert life.scheduler.stats().waiting_adapters == [B.name]
    assert life.scheduler.stats().running_adapters == [A.name]
    life.run()
    assert [names(plan) for plan in life.plans if plan.adapters] == [[A.name], [B.name]]
    life.check_empty()


def test_the_least_recently_used_makes_room() -> None:
    life = begin(adapter_slots=2)
    for name, adapter in (("1", A), ("2", B), ("3", A), ("4", C), ("5", A), ("6", B)):
        add(life, name, adapter)
        life.run()
    assert [names(plan) for plan in life.plans if plan.adapters] == [[A.name], [B.name], [C.name], [B.name]]


def test_nobody_waits_for_ever_for_a_slot_that_never_falls_out_of_use() -> None:
    life = begin(max_num_seqs=2)
    add(life, "0", A)
    life.turn()
    add(life, "other", B)
    for number in range(1, 40):
        add(life, str(number), A)
        life.turn()
        life.turn()
        if "other" not in life.open:
            break
    assert "other" not in life.open
    life.run()
    life.check_empty()


def test_the_urgent_take_the_slots_of_the_less_urgent() -> None:
    life = begin(policy="priority")
    add(life, "low", A, max_tokens=30, priority=5)
    life.turn()
    add(life, "high", B, max_tokens=2)
    life.turn()
    assert life.scheduler.stats().running_adapters == [B.name]
    life.run()
    assert life.scheduler.stats().num_preemptions == 1


def test_who_stood_aside_and_was_aborted_leaves_nothing_behind() -> None:
    life = begin()
    for name, adapter in (("a", A), ("b", B), ("c", C)):
        add(life, name, adapter)
    life.turn()
    life.abort("b")
    life.abort("a")
    life.run()
    life.check_empty()
