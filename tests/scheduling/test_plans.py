"""What the scheduler plans, in small scenes that can be followed by hand. Blocks hold 4 tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from quire.foundation.errors import ConfigError, InputError
from quire.scheduling.scheduler import Scheduler
from quire.types.plan import StepPlan
from quire.types.request import BACKGROUND
from tests.scheduling.simulator import groups, make_request
from tests.scheduling.traces import Life, World


def begin(**world: Any) -> Life:
    return Life(World(**world))


def add(life: Life, name: str, prompt: list[int], max_tokens: int = 8, **options: Any) -> None:
    options.setdefault("stops", ())  # scenes end by length unless they say otherwise
    life.add(make_request(name, prompt, max_tokens, number=len(life.references), **options))


def rows(plan: StepPlan) -> list[tuple[int, int, bool]]:
    """(seat, tokens, samples) a row."""
    return list(zip(plan.seats.tolist(), plan.num_tokens.tolist(), plan.samples.tolist(), strict=True))


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


# --- catching up ----------------------------------------------------------------------------------------------------


def test_a_prompt_comes_in_chunks_and_only_the_last_one_samples() -> None:
    life = begin(max_num_batched_tokens=8, depth=1)
    add(life, "a", prompt(18), 2)
    first = life.plan()
    assert rows(first) == [(1, 8, False)]
    assert first.token_ids.tolist() == prompt(8)
    assert [(admit.seat, admit.num_computed, admit.num_prompt) for admit in first.admits] == [(1, 0, 18)]
    assert (first.blocks[0].seats.tolist(), first.blocks[0].index.tolist()) == ([1, 1], [0, 1])
    assert rows(life.plan()) == [(1, 8, False)]
    last = life.plan()
    assert rows(last) == [(1, 2, True)]
    decode = life.plan()
    assert rows(decode) == [(1, 1, True)]
    assert (decode.num_decodes, decode.token_ids.tolist(), decode.max_seq_len) == (1, [], 19)
    assert (decode.admits, decode.releases) == ([], [])


def test_decodes_come_first_then_running_prompts_then_new_ones_within_the_budget() -> None:
    life = begin(max_num_batched_tokens=8)
    add(life, "a", prompt(3))
    add(life, "b", prompt(9, 200))
    life.plan()  # all of a, 5 of b rounded down to a whole block
    add(life, "c", prompt(9, 300))
    plan = life.plan()
    assert rows(plan) == [(1, 1, True), (2, 5, True), (3, 2, False)]
    assert plan.num_decodes == 1
    assert plan.token_ids.tolist() == [*prompt(5, 204), 300, 301]


def test_a_chunk_limit_leaves_room_for_others() -> None:
    life = begin(max_prefill_chunk=4, max_num_batched_tokens=16)
    add(life, "long", prompt(40))
    add(life, "short", prompt(3, 200))
    assert rows(life.plan()) == [(1, 4, False), (2, 3, True)]


# --- running ahead --------------------------------------------------------------------------------------------------


def test_tokens_need_not_be_seen_to_go_on() -> None:
    life = begin(depth=3)
    add(life, "a", prompt(4))
    plans = [life.plan() for _ in range(3)]
    assert [rows(plan) for plan in plans] == [[(1, 4, True)], [(1, 1, True)], [(1, 1, True)]]
    life.run()
    life.check_empty()


def test_lengths_are_known_ahead_and_never_overrun() -> None:
    life = begin(depth=3)
    add(life, "a", prompt(4), max_tokens=2)
    assert life.plan()
    assert life.plan()
    assert life.plan_if_any() is None  # both tokens are on their way
    life.run()
    assert life.device.num_computed == 5
    life.check_empty()


def test_a_steady_batch_is_the_same_array_step_after_step() -> None:
    life = begin()
    for name in "abc":
        add(life, name, prompt(4), 12)
    plans = []
    for _ in range(6):
        life.plan()
        plans.append(life.plans[-1].seats)
        life.settle()
    assert all(seats is plans[1] for seats in plans[2:])
    assert plans[1].tolist() == [1, 2, 3]


def test_a_stop_wastes_at_most_the_rows_that_were_under_way() -> None:
    life = begin(depth=2)
    add(life, "a", prompt(4), 20)
    stop = life.references["a"].output[2]
    life = begin(depth=2)
    add(life, "a", prompt(4), 20, stops=(stop,))
    length = len(life.references["a"].output)
    life.run()
    assert life.told["a"][-1].finish_reason == "stop"
    assert life.device.num_computed == 4 + length  # one row more than the answer needed
    life.check_empty()


# --- prefix cache ---------------------------------------------------------------------------------------------------


def test_a_known_beginning_is_not_computed_again() -> None:
    life = begin()
    add(life, "a", prompt(11), 2)
    life.run()
    add(life, "b", [*prompt(8), 7, 7], 2)
    plan = life.plan()
    assert rows(plan) == [(plan.seats[0], 2, True)]
    assert plan.admits[0].num_computed == 8
    assert plan.blocks[0].index.tolist() == [0, 1, 2]  # the cached blocks enter the table like new ones
    life.run()
    assert (life.told["a"][0].num_cached_tokens, life.told["b"][0].num_cached_tokens) == (0, 8)
    stats = life.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.cached_tokens) == (21, 8, 8)


def test_at_least_one_token_is_computed() -> None:
    life = begin()
    add(life, "a", prompt(8), 2)
    life.run()
    add(life, "b", prompt(8), 2)
    plan = life.plan()
    assert plan.num_tokens.tolist() == [4]


def test_neighbours_in_one_plan_share() -> None:
    life = begin(max_num_batched_tokens=32)
    add(life, "a", [*prompt(8), 1], 2)
    add(life, "b", [*prompt(8), 2], 2)
    plan = life.plan()
    assert [count for _, count, _ in rows(plan)] == [9, 1]
    life.run()


@pytest.mark.parametrize("chunk", [0, 512])
@pytest.mark.parametrize("budget", [2048, 8192])
def test_many_requests_with_one_long_prefix_compute_it_once(budget: int, chunk: int) -> None:
    scheduler = Scheduler(
        max_num_seqs=256,
        max_num_batched_tokens=budget,
        max_prefill_chunk=chunk,
        max_model_len=8192,
        num_blocks=4096,
        groups=groups(16),
    )
    for i in range(256):
        scheduler.add(make_request(f"r{i}", [*prompt(4096), i, i, i], 1))
    computed = 0
    while plan := scheduler.plan():  # each request is drained after its prompt: nothing needs settling
        computed += int(plan.num_tokens.sum())
    assert computed == 4096 + 256 * 3
    scheduler.check()


def test_a_running_prompt_jumps_over_what_others_have_computed() -> None:
    life = begin(max_prefill_chunk=4, max_num_batched_tokens=8)
    add(life, "a", [*prompt(12), 1], 2)
    add(life, "b", [*prompt(12), 2], 2)
    assert rows(life.plan()) == [(1, 4, False), (2, 4, False)]  # b goes on where a will be
    plan = life.plan()
    assert [(admit.seat, admit.num_computed) for admit in plan.admits] == [(1, 8), (2, 12)]
    assert plan.releases == [1, 2]  # to the worker they sit down anew
    assert rows(plan) == [(1, 4, False), (2, 1, True)]
    life.run()
    life.check_empty()


def test_answers_are_cached_for_the_next_turn() -> None:
    life = begin()
    add(life, "a", prompt(6), 7)
    life.run()
    add(life, "b", [*prompt(6), *life.output("a"), 50], 2)
    plan = life.plan()
    assert plan.admits[0].num_computed == 12  # 6 + 7 tokens, the last one without KV: three full blocks


@pytest.mark.parametrize("options", [{"cache_salt": "mine"}, {"skip_reading_prefix_cache": True}])
def test_some_requests_do_not_read_the_cache(options: dict[str, Any]) -> None:
    life = begin()
    add(life, "a", prompt(11), 2)
    life.run()
    add(life, "b", prompt(11), 2, **options)
    plan = life.plan()
    assert plan.admits[0].num_computed == 0


# --- room -----------------------------------------------------------------------------------------------------------


def test_the_latest_request_yields_when_blocks_run_out_and_comes_back_with_all_its_tokens() -> None:
    life = begin(num_blocks=7, depth=2)  # 6 blocks
    add(life, "old", prompt(7), 12)
    add(life, "new", prompt(7, 200), 12)
    seen = 0
    while not life.scheduler.stats().num_preemptions:
        seen = len(life.output("new"))
        life.turn()
    plan = life.plans[-1]
    assert plan.seats.tolist() == [1]
    assert plan.releases == [2]
    life.run()
    back = next(plan for plan in life.plans if plan.step > 0 and plan.admits)
    assert back.admits[0].num_prompt == 7
    # It goes on from all its tokens, the one that was in flight when it lost its seat included.
    assert back.admits[0].num_computed + back.num_tokens[-1] == 7 + seen + 1
    assert life.told["new"][-1].num_preemptions == 1
    assert life.told["old"][-1].num_preemptions == 0
    life.check_empty()


def test_nobody_is_let_in_who_would_be_thrown_out_at_once() -> None:
    life = begin(num_blocks=5)  # 4 blocks
    add(life, "a", prompt(7), 8)
    add(life, "b", prompt(7, 200), 8)  # 2 + 2 blocks, but a is about to take its third
    life.run()
    assert life.scheduler.stats().num_preemptions == 0


def test_room_that_a_running_prompt_still_needs_is_kept_for_it() -> None:
    life = begin(num_blocks=9, max_prefill_chunk=4)  # 8 blocks
    add(life, "a", prompt(24), 2)  # will need 6
    add(life, "b", prompt(8, 200), 8)  # needs 2 and soon a third
    life.run()
    assert life.scheduler.stats().num_preemptions == 0
    assert [admit.seed for plan in life.plans for admit in plan.admits] == [0, 1]


def test_who_computes_nothing_more_yields_first() -> None:
    life = begin(num_blocks=5, depth=2)  # 4 blocks
    add(life, "ending", prompt(4), 2)
    add(life, "growing", prompt(7, 200), 9)
    life.run()
    # Its last token is on the way when its blocks are taken: it never has to come back.
    assert [life.told[name][-1].num_preemptions for name in ("ending", "growing")] == [1, 0]
    assert sum(len(plan.admits) for plan in life.plans) == 2


def test_a_waiting_request_holds_back_those_behind_it() -> None:
    life = begin(num_blocks=9)
    add(life, "a", prompt(16), 2)
    add(life, "big", prompt(24, 200), 2)
    add(life, "small", prompt(1, 300), 2)
    plan = life.plan()
    assert plan.num_rows == 1
    life.run()


def test_more_urgent_requests_take_the_seats_of_less_urgent_ones() -> None:
    life = begin(policy="priority", max_num_seqs=2)
    add(life, "a", prompt(4), 12, priority=1)
    add(life, "b", prompt(4, 200), 12, priority=2)
    life.turn()
    add(life, "same", prompt(4, 300), 12, priority=2)
    life.turn()
    assert life.scheduler.stats().num_preemptions == 0
    add(life, "urgent", prompt(4, 400), 12, priority=0)
    plan = life.plan()
    assert plan.releases == [admit.seat for admit in plan.admits]
    assert plan.admits[0].seed == 3
    life.run()
    assert [life.told[name][-1].num_preemptions for name in ("a", "b", "same", "urgent")] == [0, 1, 0, 0]


def test_under_first_come_first_served_priorities_mean_nothing() -> None:
    life = begin(max_num_seqs=1)
    add(life, "a", prompt(4), 2, priority=5)
    add(life, "b", prompt(4, 200), 2, priority=-5)
    life.run()
    assert life.scheduler.stats().num_preemptions == 0
    assert list(life.told) == ["a", "b"]


@pytest.mark.parametrize("caching", [True, False])
def test_forced_preemption_still_ends(caching: bool) -> None:
    life = begin(preempt_every_step=True, enable_prefix_caching=caching, max_prefill_chunk=4)
    for i in range(4):
        add(life, f"r{i}", prompt(9, 100 * i), 8)
    life.run()
    assert life.scheduler.stats().num_preemptions > 10
    life.check_empty()


def test_forced_preemption_takes_only_who_got_a_token() -> None:
    life = begin(preempt_every_step=True, enable_prefix_caching=False, max_num_batched_tokens=4, depth=1)
    add(life, "a", prompt(12), 2)
    for _ in range(3):
        life.turn()
        assert life.scheduler.stats().num_preemptions == 0
    life.run()


# --- cancelling -----------------------------------------------------------------------------------------------------


def test_abort_frees_everything_at_once_and_the_seat_may_be_reused_in_the_next_step() -> None:
    life = begin(max_num_seqs=1)
    add(life, "a", prompt(8))
    add(life, "b", prompt(4, 200))
    life.plan()
    life.plan()
    life.abort("a")
    stats = life.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 1, 16)
    plan = life.plan()
    assert plan.releases == [1]
    assert [admit.seat for admit in plan.admits] == [1]
    life.run()
    assert life.told["a"] == []
    life.check_empty()


def test_unknown_and_waiting_requests_can_be_aborted() -> None:
    life = begin(max_num_seqs=1)
    add(life, "a", prompt(4))
    add(life, "b", prompt(4))
    life.plan()
    life.scheduler.abort(["nobody", "b", "b"])
    life.open.pop("b")
    life.run()
    life.check_empty()
    assert life.told["b"] == []


def test_a_name_is_free_again_once_its_request_is_over() -> None:
    life = begin()
    add(life, "a", prompt(4))
    with pytest.raises(InputError, match="'a' is in use"):
        add(life, "a", prompt(4))
    life.plan()
    life.abort("a")
    add(life, "a", prompt(5, 200), 3)  # while a row of its namesake is still in flight
    life.run()
    life.check_empty()


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (0, 4, "at least 1 token"),
        (4, 0, "max_tokens must be >= 1, got 0"),
        (32, 4, "has 32 tokens; with 1 token of output the context of 32 tokens"),
        (24, 4, "has 24 tokens; with 1 token of output the KV cache of 24 tokens"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(length: int, max_tokens: int, message: str) -> None:
    life = begin(max_model_len=32, num_blocks=7)
    spec = make_request("a", prompt(length), 4)
    spec = type(spec)(**{**{f: getattr(spec, f) for f in spec.__struct_fields__}, "max_tokens": max_tokens})
    with pytest.raises(InputError, match=message):
        life.scheduler.add(spec)
    assert not life.scheduler.has_work


@pytest.mark.parametrize("ids", [[1, 2], np.array([1, 2]), np.array([1.5], np.float32), np.zeros((2, 2), np.int32)])
def test_token_ids_that_are_no_int32_are_refused(ids: Any) -> None:
    life = begin()
    with pytest.raises(InputError, match="int32"):
        life.scheduler.add(msgspec.structs.replace(make_request("a", [1], 4), token_ids=ids))
    assert not life.scheduler.has_work


def test_an_answer_ends_where_the_cache_does() -> None:
    life = begin(num_blocks=7, max_model_len=1000)
    add(life, "a", prompt(5), 500)
    life.run()
    assert len(life.output("a")) == 6 * 4 - 5
    assert life.told["a"][-1].finish_reason == "length"


def test_numbers_that_fit_no_request_are_refused() -> None:
    fine: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "max_model_len": 16,
        "num_blocks": 9,
        "groups": groups(4),
    }
    for change, message in (
        ({"max_num_seqs": 0}, r"max_num_seqs must be in \[1, max_num_batched_tokens = 8\], got 0"),
        ({"max_num_seqs": 9}, "got 9"),
        ({"max_model_len": 1}, "max_model_len is 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Scheduler(**{**fine, **change})
    Scheduler(**fine)


def test_plans_hold_int32_arrays() -> None:
    life = begin()
    add(life, "a", prompt(5), 4)
    for plan in (life.plan(), life.plan()):
        for array in (plan.seats, plan.num_tokens, plan.token_ids, *vars_of(plan)):
            assert array.dtype == np.int32
        assert plan.samples.dtype == np.bool_


def vars_of(plan: StepPlan) -> list[np.ndarray]:
    return [array for new in plan.blocks for array in (new.seats, new.index, new.blocks)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_work_in_the_background_yields_under_either_policy(policy: str) -> None:
    life = begin(policy=policy, max_num_seqs=1)
    add(life, "behind", prompt(4), 12, priority=BACKGROUND)
    add(life, "behind too", prompt(4, 100), 2, priority=BACKGROUND)
    life.turn()
    assert life.scheduler.stats().num_preemptions == 0
    add(life, "asked", prompt(4, 200), 2)
    plan = life.plan()
    assert [admit.seed for admit in plan.admits] == [2]
    assert plan.releases == [1]
    life.run()
    assert [life.told[name][-1].num_preemptions for name in ("behind", "behind too", "asked")] == [1, 0, 0]


def test_a_prompt_in_the_background_takes_what_others_leave_of_a_step() -> None:
    life = begin(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=40)
    add(life, "behind", prompt(48), 2, priority=BACKGROUND)
    life.turn()
    add(life, "asked", prompt(12, 200), 2)
    plan = life.plan()
    assert sorted(plan.num_tokens.tolist()) == [4, 12]
    assert plan.samples.tolist() == [True, False]
    life.run()
    life.check_empty()
