"""When rows that begin alike are told to the worker, and when not. Blocks hold 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from quire.scheduling.prefixes import SharingThresholds
from quire.types.kv import KVGroupSpec
from quire.types.plan import StepPlan
from tests.scheduling.simulator import history, make_request, windowed
from tests.scheduling.traces import Life, World

Groups = dict[frozenset[int], int]  # seats: shared tokens


def begin(*thresholds: int, **world: Any) -> Life:
    options = {"num_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 128, "depth": 1}
    return Life(World(**{**options, **world}, sharing_thresholds=SharingThresholds(*thresholds)))


def add(life: Life, prompts: list[list[int]], max_tokens: int = 40, **options: Any) -> None:
    for prompt in prompts:
        number = len(life.references)
        life.add(make_request(f"r{number}", prompt, max_tokens, number=number, stops=(), **options))


def stem(length: int, first: int = 100) -> list[int]:
    return list(range(first, first + length))


def tails(shared: list[int], count: int) -> list[list[int]]:
    return [[*shared, 1000 + i] for i in range(count)]


def told(plan: StepPlan) -> Groups | None:
    if plan.prefixes is None:
        return None
    starts, seats = plan.prefixes.starts.tolist(), plan.prefixes.seats.tolist()
    tokens = plan.prefixes.num_tokens.tolist()
    return {frozenset(seats[a:b]): n for a, b, n in zip(starts[:-1], starts[1:], tokens, strict=True)}


def step(life: Life) -> Groups | None:
    """Plan and settle one step; what it told of prefixes."""
    plan = life.plan()
    life.settle()
    return told(plan)


def test_a_group_is_told_at_its_first_decode_step_and_then_never_again() -> None:
    life = begin(4, 4, 4)
    add(life, tails(stem(10), 3))
    assert step(life) is None  # the prompts
    assert step(life) == {frozenset({1, 2, 3}): 8}
    for _ in range(20):  # new blocks come on the way
        assert step(life) is None
    life.run()


def test_two_prefixes_are_two_groups_and_the_one_that_saves_more_comes_first() -> None:
    life = begin(4, 4, 4)
    add(life, [*tails(stem(9), 3), stem(7, 500), *tails(stem(21, 300), 2), [*stem(21, 300), 7, 8]])
    step(life)
    plan = life.plan()
    assert told(plan) == {frozenset({5, 6, 7}): 20, frozenset({1, 2, 3}): 8}
    assert plan.prefixes is not None
    assert plan.prefixes.num_tokens.tolist() == [20, 8]


def test_a_prompt_that_is_a_prefix_itself_keeps_a_block_of_its_own() -> None:
    life = begin(4, 4, 4)
    add(life, [stem(12), stem(8), stem(9)])
    step(life)
    assert step(life) == {frozenset({1, 3}): 8}  # the second had to compute its last token, and with it the block
    life.run()


def test_who_leaves_is_not_told_and_who_comes_is() -> None:
    life = begin(4, 4, 4)
    add(life, tails(stem(10), 4))
    step(life)
    assert step(life) == {frozenset({1, 2, 3, 4}): 8}
    life.abort("r1")
    assert step(life) is None
    add(life, [[*stem(10), 77]])
    assert step(life) is None  # its prompt; it takes the seat of the one that left
    assert step(life) == {frozenset({1, 2, 3, 4}): 8}
    add(life, [stem(30, 600)])
    assert [step(life), step(life)] == [None, None]  # one that shares nothing changes nothing
    life.run()


def test_a_group_of_which_one_is_left_is_given_up() -> None:
    life = begin(4, 4, 4)
    add(life, [*tails(stem(10), 2), *tails(stem(14, 300), 3)])
    step(life)
    assert step(life) == {frozenset({1, 2}): 8, frozenset({3, 4, 5}): 12}
    life.abort("r0")
    assert step(life) == {frozenset({3, 4, 5}): 12}
    life.abort("r3")
    assert step(life) is None
    life.abort("r4")
    assert step(life) == {}
    assert step(life) is None


def test_one_that_has_little_in_common_does_not_cost_the_others_what_they_have() -> None:
    life = begin(4, 4, 4)
    add(life, tails(stem(41), 3))
    step(life)
    assert step(life) == {frozenset({1, 2, 3}): 40}
    add(life, [[*stem(5), 1]])
    assert [step(life), step(life)] == [None, None]
    add(life, [[*stem(37), i] for i in range(2)])  # of these two there is more to gain
    step(life)
    assert step(life) == {frozenset({1, 2, 3, 5, 6}): 36}


@pytest.mark.parametrize(
    ("thresholds", "expected"),
    [
        ((8, 16, 16), {frozenset({1, 2, 3}): 8}),
        ((12, 16, 16), None),  # the prefix is too short
        ((8, 20, 16), None),  # the group saves too little
        ((8, 16, 20), None),  # all groups together do
    ],
)
def test_what_is_not_worth_it_is_not_told(thresholds: tuple[int, int, int], expected: Groups | None) -> None:
    life = begin(*thresholds)
    add(life, tails(stem(10), 3))
    step(life)
    assert step(life) == expected


def test_groups_stay_until_half_of_what_began_them_is_gone() -> None:
    life = begin(4, 4, 40)
    add(life, tails(stem(10), 5))
    step(life)
    assert step(life) is None  # 32 tokens saved
    add(life, tails(stem(10), 1))
    step(life)
    assert step(life) == {frozenset(range(1, 7)): 8}
    for name in ("r0", "r1"):
        life.abort(name)
        assert step(life) is None  # 32, 24
    add(life, [[*stem(10), 7]])
    step(life)
    assert step(life) == {frozenset({2, 3, 4, 5, 6}): 8}  # 32, and no other begins anew
    for name in ("r2", "r3"):
        life.abort(name)
    assert step(life) == {}  # 16
    assert step(life) is None


def test_answers_of_one_prompt_and_a_second_round_from_the_cache() -> None:
    life = begin(4, 4, 4)
    for _ in range(2):
        add(life, [stem(23)] * 4, 6)
        step(life)
        assert step(life) == {frozenset({1, 2, 3, 4}): 20}
        life.run()


@pytest.mark.parametrize("world", [{"enable_prefix_caching": False}, {"groups": (windowed(4, 8), history(64))}])
def test_where_nothing_can_be_shared_nothing_is_told(world: dict[str, Any]) -> None:
    life = begin(1, 1, 1, **world)
    add(life, tails(stem(10), 4), 8)
    life.run()
    assert life.device.num_groupings == 0


def test_layers_that_see_everything_share_beside_layers_with_windows() -> None:
    life = begin(1, 1, 1, groups=(windowed(4, 6), KVGroupSpec("full", 8, 1, 1, 8, 2)))
    add(life, tails(stem(20), 4), 8)
    sends = [groups for _ in range(5) if (groups := step(life))]
    life.run()
    assert sends == [{frozenset({1, 2, 3, 4}): 16}]
    life.check_empty()


def test_a_preempted_row_comes_back_to_its_group() -> None:
    life = begin(4, 4, 4, num_blocks=12)  # 11 blocks: 2 shared and 3 times 3 of their own, for 20 tokens
    add(life, tails(stem(10), 3), 12)
    life.run()
    assert life.scheduler.stats().num_preemptions > 0
    assert life.device.num_groupings > 1


def test_a_crowd_that_comes_at_once_is_told_as_often_as_some_of_it_start_to_decode() -> None:
    """The first one computes what they share, and one step's budget is not enough for the rest of all."""
    life = begin(4, 4, 4, num_blocks=900, max_num_seqs=64, max_num_batched_tokens=128)
    add(life, tails(stem(90), 64), 8)
    sends = [step(life) for _ in range(6)]
    assert [len(next(iter(groups))) for groups in sends if groups] == [13, 51, 64]
    life.run()
    assert life.device.num_groupings == 3
