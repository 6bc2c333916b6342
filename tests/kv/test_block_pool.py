"""Who gets which block, and what is forgotten for it."""

from __future__ import annotations

import random

import pytest

from quire.kv.block_pool import Block, BlockPool


def ids(blocks: list[Block]) -> list[int]:
    return [block.id for block in blocks]


def test_blocks_are_handed_out_in_order_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    assert ids(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="1 blocks wanted, 0 are free"):
        pool.allocate(1)
    pool.check()


def test_blank_blocks_are_reused_first_and_cached_ones_in_the_order_they_were_freed() -> None:
    pool = BlockPool(6)
    old, young, blank, *rest = pool.allocate(5)
    pool.register(old, b"old")
    pool.register(young, b"young")
    pool.free([old, young, blank])
    assert pool.allocate(1) == [blank]
    assert pool.allocate(1) == [old]
    assert pool.find([b"old"]) == []  # its room was needed
    assert pool.find([b"young"]) == [young]
    pool.free(rest)
    pool.check()


def test_a_free_cached_block_can_be_taken_back() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.register(block, b"content")
    pool.free([block])
    pool.touch([block])
    assert (block.refs, pool.num_free) == (1, 2)
    pool.touch([block])  # a second reader
    pool.free([block])
    assert (block.refs, pool.num_free) == (1, 2)
    assert block not in pool.allocate(2)
    pool.check()


def test_the_first_block_with_a_content_stays_the_known_one() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register(first, b"content")
    pool.register(second, b"content")
    assert pool.find([b"content"]) == [first]
    assert second.key is None
    pool.check()


def test_freeing_too_often_is_an_error() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(ValueError, match="freed more often"):
        pool.free([block])


def test_forget_all_keeps_what_is_in_use() -> None:
    pool = BlockPool(4)
    held, free = pool.allocate(2)
    pool.register(held, b"a")
    pool.register(free, b"b")
    pool.free([free])
    pool.forget_all()
    assert pool.find([b"a"]) == []
    assert pool.find([b"b"]) == []
    assert (held.refs, pool.num_free) == (1, 2)
    pool.check()


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(4)
    pool.allocate(1)[0].refs = 0
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


@pytest.mark.parametrize("seed", range(20))
def test_random_use_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(2, 12))
    held: list[Block] = []
    for step in range(300):
        choice = rng.random()
        if choice < 0.4 and pool.num_free:
            held += pool.allocate(rng.randint(1, pool.num_free))
        elif choice < 0.7 and held:
            pool.free([held.pop(rng.randrange(len(held)))])
        elif choice < 0.85 and held:
            pool.register(rng.choice(held), rng.randbytes(1))
        elif found := pool.find([rng.randbytes(1), rng.randbytes(1)]):
            pool.touch(found)
            held += found
        if step % 10 == 0:
            pool.check()
            pool.check_refs({block.id: held.count(block) for block in held})
