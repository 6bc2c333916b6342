"""Block tables and the prefix cache over them."""

from __future__ import annotations

from array import array

import pytest

from quire.foundation.errors import ConfigError
from quire.kv.manager import KVManager
from quire.types.kv import KVGroupSpec


class Owner:
    def __init__(self, name: str, tokens: list[int], extra: bytes = b"") -> None:
        self.id, self.tokens, self.extra_key = name, array("i", tokens), extra
        self.hashes: list[bytes] = []


def spec(block_size: int = 4, kind: str = "full") -> KVGroupSpec:
    return KVGroupSpec(kind, block_size, 1, 1, 8, 2)


def run_through(kv: KVManager, owner: Owner) -> None:
    """Compute all tokens of a request without a hit, as a first chunk does."""
    kv.admit(owner, [[] for _ in kv.groups])
    assert kv.allocate(owner, len(owner.tokens)) is not None
    kv.register(owner, len(owner.tokens))


@pytest.mark.parametrize("num_groups", [1, 2])
def test_full_blocks_are_found_again_also_after_their_request_is_gone(num_groups: int) -> None:
    kv = KVManager(20, [spec()] * num_groups)
    first = Owner("a", list(range(10)))
    run_through(kv, first)
    tables = [list(table) for table in kv.table(first)]
    second = Owner("b", [*range(8), 99, 98])
    hit, num_tokens = kv.find_cached(second, 9)
    assert (hit, num_tokens) == ([table[:2] for table in tables], 8)
    kv.admit(second, hit)
    kv.free(first)
    kv.check()
    kv.free(second)
    assert kv.find_cached(Owner("c", list(range(10))), 9) == (hit, 8)
    assert kv.usage == 0.0
    kv.check()


def test_only_whole_blocks_within_the_allowed_tokens_are_hit() -> None:
    kv = KVManager(20, [spec()])
    run_through(kv, Owner("a", list(range(8))))
    for allowed, found in ((7, 4), (8, 8), (3, 0), (0, 0)):
        assert kv.find_cached(Owner("b", list(range(8))), allowed)[1] == found


def test_needed_blocks_count_hits_that_are_free() -> None:
    kv = KVManager(6, [spec()])
    owner = Owner("a", list(range(8)))
    run_through(kv, owner)
    hit, _ = kv.find_cached(Owner("b", list(range(12))), 11)
    assert kv.num_needed(12, hit) == 1  # two are shared with a running request
    kv.free(owner)
    assert kv.num_needed(12, hit) == 3  # taking them back uses up free blocks


def test_allocate_refuses_rather_than_taking_a_part() -> None:
    kv = KVManager(4, [spec()])
    owner = Owner("a", list(range(16)))
    kv.admit(owner, [[]])
    assert kv.allocate(owner, 16) is None
    assert kv.num_free == 3
    new = kv.allocate(owner, 12)
    assert new is not None
    assert [block.id for block in new[0]] == [1, 2, 3]
    assert kv.allocate(owner, 12) == [[]]
    assert kv.capacity == 12


def test_the_beginning_of_a_sequence_is_remembered_longest() -> None:
    kv = KVManager(9, [spec()])
    owner = Owner("a", list(range(16)))
    run_through(kv, owner)
    kv.free(owner)
    for held, found in ((4, 16), (5, 12), (6, 8), (7, 4), (8, 0)):
        other = Owner("b", [7] * 4 * held)
        kv.admit(other, [[]])
        kv.allocate(other, 4 * held)
        assert kv.find_cached(Owner("c", list(range(16))), 16)[1] == found
        kv.free(other)


def test_a_salt_separates_and_a_reset_forgets() -> None:
    kv = KVManager(20, [spec()])
    run_through(kv, Owner("a", list(range(8)), extra=b"salt"))
    assert kv.find_cached(Owner("b", list(range(8))), 7)[1] == 0
    same = Owner("c", list(range(8)), extra=b"salt")
    assert kv.find_cached(same, 7)[1] == 4
    kv.reset_prefix_cache()
    assert kv.find_cached(same, 7)[1] == 0
    kv.check()


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVManager(20, [spec()], enable_prefix_caching=False)
    run_through(kv, Owner("a", list(range(8))))
    assert kv.find_cached(Owner("b", list(range(8))), 7) == ([[]], 0)


def test_what_it_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'mamba'; known kinds: full, window"):
        KVManager(9, [spec(kind="mamba")])
    with pytest.raises(ConfigError, match="must have a KV group"):
        KVManager(9, [])


def test_check_sees_a_block_that_no_table_holds() -> None:
    kv = KVManager(9, [spec()])
    kv.pool.allocate(1)
    with pytest.raises(AssertionError, match="1 blocks are taken, 0 are in a table"):
        kv.check()
