"""When steps have drafts, and what settling them tells."""

from __future__ import annotations

import numpy as np
import pytest

from quire.scheduling.drafting import Drafting
from quire.types.kv import DraftCost
from quire.types.output import EngineOutputs
from quire.types.sampling import RequestOutputKind
from tests.scheduling.simulator import make_request
from tests.scheduling.traces import Life, World

COSTS = [DraftCost(1, 1.0, 1.05), DraftCost(16, 1.1, 1.4), DraftCost(64, 1.2, 4.0)]
SEATS = np.arange(1, 65, dtype=np.int32)


def drafting(max_rows: int = 64, costs: list[DraftCost] = COSTS) -> Drafting:
    made = Drafting(4, 64, max_rows, costs)
    for seat in SEATS:
        made.forget(seat)
    return made


def learn(made: Drafting, rows: int, drafted: int, matched: int, times: int = 1, *, verified: bool = False) -> None:
    for _ in range(times):
        columns = (np.full(rows, count, np.int32) for count in (drafted, matched))
        made.learn(SEATS[:rows], *columns, verified=verified)


def wanted(made: Drafting, rows: int) -> int:
    return made.wanted(SEATS[:rows], np.ones(rows, np.bool_))


def test_nobody_drafts_before_a_draft_would_have_been_right() -> None:
    made = drafting()
    assert wanted(made, 1) == 0
    learn(made, 1, 1, 1, times=2)
    assert wanted(made, 1) == 4


def test_drafts_that_are_wrong_or_that_nobody_makes_end_it() -> None:
    for drafted in (0, 4):
        made = drafting()
        learn(made, 16, 1, 1, times=10)
        assert wanted(made, 16) == 4
        learn(made, 16, drafted, 0, times=20)
        assert wanted(made, 16) == 0


def test_what_a_step_costs_decides() -> None:
    made = drafting()
    learn(made, 64, 1, 1, times=3)
    learn(made, 64, 1, 0, times=1)
    assert wanted(made, 16) == 4
    assert wanted(made, 64) == 0
    learn(made, 64, 4, 4, times=10)
    assert wanted(made, 64) == 4  # nearly all are right: five tokens for the cost of three and a half


def test_one_row_that_repeats_itself_does_not_make_many_pay() -> None:
    made = drafting()
    learn(made, 1, 4, 4, times=10)
    assert wanted(made, 1) == 4
    assert wanted(made, 64) == 0


def test_who_may_not_draft_counts_as_a_row_without_gain() -> None:
    made = drafting()
    learn(made, 16, 4, 4, times=10)
    may_draft = np.zeros(16, np.bool_)
    assert made.wanted(SEATS[:16], may_draft) == 0
    may_draft[:8] = True
    assert made.wanted(SEATS[:16], may_draft) == 4


def test_measured_times_replace_those_of_the_start_and_are_forgotten() -> None:
    made = drafting()
    learn(made, 16, 4, 2, times=10)
    assert wanted(made, 16) == 4
    for _ in range(5):
        made.observe(16, 0, 1.0)
        made.observe(16, 4, 9.0)
    assert made.cost(16) == 9
    assert wanted(made, 16) == 0
    for _ in range(600):
        made.observe(16, 0, 1.0)
    assert made.cost(16) == pytest.approx(1.4 / 1.1)
    assert wanted(made, 16) == 4


def test_without_any_measurement_a_draft_has_a_price() -> None:
    made = drafting(costs=[])
    assert 1.2 < made.cost(8) < 2


def test_rows_beyond_what_the_worker_has_room_for_never_draft() -> None:
    made = drafting(max_rows=15)
    learn(made, 16, 4, 4, times=10)
    assert [wanted(made, rows) for rows in (15, 16)] == [4, 0]


def test_drafts_are_counted_by_their_place() -> None:
    made = drafting()
    made.learn(SEATS[:4], np.array([4, 4, 2, 0], np.int32), np.array([4, 1, 0, 0], np.int32), verified=True)
    made.learn(SEATS[:1], np.array([1], np.int32), np.array([1], np.int32), verified=False)
    assert (made.num_rounds, made.num_drafted, made.accepted_at.tolist()) == (3, 10, [2, 1, 1, 1])


def world(**changes: int) -> World:
    sizes = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_drafts": 3}
    return World(**{**sizes, **changes})  # type: ignore[arg-type]


def test_no_step_with_prompts_has_drafts() -> None:
    life = Life(world(max_num_batched_tokens=16))
    for number in range(4):
        life.add(make_request(f"r{number}", [1 + number] * (9 * number + 1), 12, number=number, stops=()))
        life.turn()
    life.run()
    life.check_empty()
    assert {plan.num_drafts for plan in life.plans if plan.num_decodes < plan.num_rows} == {0}
    assert sum(plan.num_drafts > 0 for plan in life.plans) > 3


def test_too_few_blocks_mean_no_drafts_before_they_mean_a_preemption() -> None:
    """The request alone needs every block there is, and never one more."""
    life = Life(world(num_blocks=9, block_size=2, max_model_len=16, max_num_seqs=1))
    life.add(make_request("r", [1, 2, 3], 13, stops=()))
    life.run()
    life.check_empty()
    assert life.scheduler.stats().num_preemptions == 0
    assert sum(plan.num_drafts > 0 for plan in life.plans) > 1


def test_news_of_several_tokens_keep_the_list_of_ids() -> None:
    life = Life(world())
    for number in range(3):
        life.add(make_request(f"r{number}", [1, 2, number], 30, number=number, stops=(), output_kind=kinds[number]))
    news: list[EngineOutputs] = []
    settle = life.scheduler.settle
    life.scheduler.settle = lambda *args: news.append(settle(*args)) or news[-1]  # type: ignore[func-returns-value,method-assign]
    life.run()
    several = [outputs for outputs in news if outputs.counts and max(outputs.counts) > 1]
    assert len(several) > 2
    assert all(len(outputs.tokens) == sum(outputs.counts or ()) for outputs in several)
    whole = [outputs.ids for outputs in several if outputs.ids == ["r0", "r1"]]
    assert len(whole) > 1
    assert len({id(ids) for ids in whole}) == 1


kinds = [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY]
