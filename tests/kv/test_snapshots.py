"""Where copies of states are made, and who goes on from one."""

from __future__ import annotations

import pytest

from quire.kv.manager import KVManager
from quire.kv.snapshots import STEP, Copies
from quire.types.kv import MAX_TOKENS, KVGroupSpec
from tests.kv.test_manager import Owner


def spec(kind: str, size: int = 4) -> KVGroupSpec:
    if kind == "state":
        return KVGroupSpec("state", MAX_TOKENS, 1, 1, 1, 4, state_bytes=64, pages=2)
    return KVGroupSpec(kind, size, 1, 1, 8, 2, window=5 if kind == "window" else 0)


def compute(kv: KVManager, owner: Owner, chunk: int = 1000) -> tuple[int, list[int], list[Copies]]:
    """A request from its first token to its last, alone: tokens found, ends of chunks, copies after each of them and
    before the first."""
    hit, start = kv.find_cached(owner, len(owner.tokens) - 1)
    kv.admit(owner, hit, start)
    cached, ends, copies = start, [], []
    while start < len(owner.tokens):
        start = min(len(owner.tokens), start + chunk, kv.next_stop(owner, start))
        assert kv.allocate(owner, start) is not None
        kv.register(owner, start)
        kv.reach_state(owner, start)
        before, after = kv.take_copies()
        copies += [before, after] if not ends else [after]
        assert not ends or not before
        ends.append(start)
        kv.check()
    kv.free(owner)
    kv.check()
    return cached, ends, copies


@pytest.mark.parametrize("others", [["full"], ["full", "window"], ["window", "full"], []], ids=str)
def test_a_prompt_is_cut_where_it_parts_from_others_and_at_its_last_block(others: list[str]) -> None:
    kv = KVManager(200, [spec("state"), *(map(spec, others or ["history"]))])
    size = 4 if others else STEP
    long = list(range(100, 100 + 20 * size))
    first = Owner("a", [*long, 1])
    assert compute(kv, first)[:2] == (0, [20 * size, 20 * size + 1])
    parting = Owner("b", [*long[: 10 * size + 2], *range(5 * size)])
    cached, ends, copies = compute(kv, parting)
    assert (cached, ends) == (0, [10 * size, 15 * size, 15 * size + 2])
    assert [len(found) for found in copies] == [0, 1, 1, 0]
    assert all(len(set(sources + targets)) == 4 for ((sources, targets),) in copies[1:3])
    cached, ends, copies = compute(kv, Owner("c", [*long[: 10 * size], 7, 8]))
    assert (cached, ends) == (10 * size, [10 * size + 2])
    ((sources, targets),), after = copies
    assert not after
    assert set(sources).isdisjoint(targets)
    cached, ends, copies = compute(kv, Owner("d", [*long, 1]))
    assert (cached, ends) == (20 * size, [20 * size + 1])


def test_copies_of_one_plan_are_made_once_and_take_nothing_from_each_other() -> None:
    kv = KVManager(2 + 6 + 6 + 4, [spec("state"), spec("full", 8)])
    owners = [Owner("a", list(range(17))), Owner("b", list(range(17))), Owner("c", list(range(5, 22)))]
    for owner in owners:
        kv.admit(owner, *kv.find_cached(owner, 16))
        assert kv.allocate(owner, 16) is not None
        kv.register(owner, 16)
        kv.reach_state(owner, 16)
    before, after = kv.take_copies()
    assert not before
    assert len(after) == 2, "two are the same"
    assert len({page for copy in after for pages in copy for page in pages}) == 8
    kv.check()


def test_where_no_pages_are_free_there_is_no_copy_and_runners_take_those_of_copies() -> None:
    kv = KVManager(1 + 2 + 3, [spec("state"), spec("full")])
    assert compute(kv, Owner("a", list(range(9))))[2] == [[], [], []]
    kv = KVManager(1 + 2 + 3 + 2, [spec("state"), spec("full")])
    assert compute(kv, Owner("a", list(range(9))))[2][1] != []
    assert kv.find_cached(Owner("b", list(range(9))), 8)[1] == 8
    compute(kv, Owner("c", list(range(50, 70))))
    assert kv.find_cached(Owner("d", list(range(9))), 8)[1] == 0, "its pages were needed"


def test_long_prompts_have_copies_as_far_apart_as_they_are_large() -> None:
    """Two pages of state are worth eight tokens of keys and values."""
    kv = KVManager(200, [spec("state"), spec("full")])
    _, ends, copies = compute(kv, Owner("a", list(range(41))), chunk=4)
    assert ends == [*range(4, 41, 4), 41]
    assert [bool(found) for found in copies[1:]] == [end in (8, 16, 24, 32, 40) for end in ends]
    assert compute(kv, Owner("b", [*range(24), 99]))[0] == 24


def test_a_request_that_leaves_is_not_gone_on_from_and_salts_keep_apart() -> None:
    kv = KVManager(200, [spec("state"), spec("full")])
    compute(kv, Owner("a", list(range(9))))
    assert kv.find_cached(Owner("b", list(range(9)), b"salt"), 8)[1] == 0
    owner = Owner("c", list(range(9)))
    kv.admit(owner, *kv.find_cached(owner, 8))
    kv.free(owner)
    assert kv.take_copies() == ([], [])
    kv.reset_prefix_cache()
    assert compute(kv, Owner("d", list(range(9))))[:2] == (0, [8, 9])
