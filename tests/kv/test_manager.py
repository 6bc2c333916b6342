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
    kv.admit(owner, [[] for _ in kv.groups], 0)
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
    kv.admit(second, hit, 8)
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
    kv.admit(owner, [[]], 0)
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
        kv.admit(other, [[]], 0)
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
    with pytest.raises(ConfigError, match=r"'mamba'; known kinds: full, latent, window"):
        KVManager(9, [spec(kind="mamba")])
    with pytest.raises(ConfigError, match="must have a KV group"):
        KVManager(9, [])


def test_check_sees_a_block_that_no_table_holds() -> None:
    kv = KVManager(9, [spec()])
    kv.pool.allocate(1)
    with pytest.raises(AssertionError, match="1 blocks are taken, 0 are in a table"):
        kv.check()


def window(tokens: int, block_size: int = 4) -> KVGroupSpec:
    return KVGroupSpec("window", block_size, 1, 1, 8, 2, window=tokens)


def advance(kv: KVManager, owner: Owner, chunk: int) -> None:
    """Compute all tokens of a request chunk by chunk, giving back what lies behind the window before each."""
    kv.admit(owner, [[] for _ in kv.groups], 0)
    for end in range(chunk, len(owner.tokens) + 1, chunk):
        kv.free_behind(owner, end - chunk)
        assert kv.allocate(owner, end) is not None
        kv.register(owner, end)
        kv.check()


def test_chunks_that_are_past_are_given_back() -> None:
    """A chunk of 10 tokens in blocks of 4: what a chunk's beginning shares a block with stays."""
    kv = KVManager(40, [KVGroupSpec("chunk", 4, 1, 1, 8, 2, window=10)])
    owner = Owner("a", list(range(36)))
    kv.admit(owner, *kv.find_cached(owner, 0))
    for computed, first in ((0, 0), (9, 0), (10, 2), (19, 2), (20, 5), (29, 5), (30, 7)):
        kv.free_behind(owner, computed)
        assert kv.allocate(owner, computed + 4) is not None
        assert [block.id == 0 for block in kv.table(owner)[0][: first + 1]] == [True] * first + [False]
        kv.register(owner, computed + 4)
    kv.check()
    assert kv.groups[0].spec.most_blocks(1000) == 4


def test_a_hit_needs_the_chunk_of_its_next_token() -> None:
    kv = KVManager(40, [KVGroupSpec("chunk", 4, 1, 1, 8, 2, window=12)])
    first = Owner("a", list(range(40)))
    kv.admit(first, *kv.find_cached(first, 0))
    kv.allocate(first, 40)
    kv.register(first, 40)
    kv.free(first)
    hit, tokens = kv.find_cached(Owner("b", list(range(40))), 39)
    assert tokens == 36  # where a chunk begins: nothing before it is needed
    assert [block.id for block in hit[0]] == [0] * 9
    hit, tokens = kv.find_cached(Owner("c", list(range(40))), 35)
    assert tokens == 32
    assert [block.id == 0 for block in hit[0]] == [True] * 6 + [False] * 2


def test_a_window_gives_back_what_lies_behind() -> None:
    kv = KVManager(40, [window(6)])
    owner = Owner("a", list(range(40)))
    advance(kv, owner, 4)
    assert [block.id != 0 for block in kv.table(owner)[0]] == [False] * 7 + [True] * 3  # 36 - 6 + 1 = 31 is in the 8th
    assert kv.num_held(owner) == 3
    kv.free_behind(owner, 40)
    assert kv.num_held(owner) == 2
    kv.free(owner)
    assert kv.num_free == 39
    kv.check()


def test_a_hit_needs_only_what_its_first_token_sees() -> None:
    kv = KVManager(40, [window(6)])
    owner = Owner("a", list(range(40)))
    advance(kv, owner, 4)
    kv.free(owner)
    hit, num_tokens = kv.find_cached(Owner("b", list(range(40))), 39)
    assert num_tokens == 36
    assert [block.id != 0 for block in hit[0]] == [False] * 7 + [True] * 2
    for left, found in ((6, 36), (1, 0)):  # what lay behind the window was given back first, and is reused first
        other = Owner("c", [])
        kv.admit(other, [[]], 0)
        kv.allocate(other, 4 * (kv.num_free - left))
        assert kv.find_cached(Owner("d", list(range(40))), 39)[1] == found
        kv.free(other)


@pytest.mark.parametrize("order", [1, -1])
def test_a_hit_is_the_longest_that_every_group_can_serve(order: int) -> None:
    kv = KVManager(60, [spec(8), window(5)][::order])
    assert kv.alignment == 8
    owner = Owner("a", list(range(40)))
    advance(kv, owner, 8)
    hit, num_tokens = kv.find_cached(Owner("b", list(range(40))), 39)
    assert num_tokens == 32
    entries = {
        group.spec.kind: [block.id != 0 for block in blocks] for group, blocks in zip(kv.groups, hit, strict=True)
    }
    assert entries == {"full": [True] * 4, "window": [False] * 7 + [True]}
    # The window's block before token 32 is gone: the next shorter hit ends where both groups have their blocks.
    lost = kv.table(owner)[[group.spec.kind for group in kv.groups].index("window")][7]
    del kv.pool._cached[lost.key]
    lost.key = None
    assert kv.find_cached(Owner("c", list(range(40))), 39)[1] == 24
    kv.check()


def test_a_running_request_jumps_over_what_others_have_computed() -> None:
    kv = KVManager(60, [spec(), window(6)])
    first, second = Owner("a", list(range(40))), Owner("b", list(range(40)))
    kv.admit(second, [[], []], 0)
    kv.allocate(second, 8)
    advance(kv, first, 8)
    hit, num_tokens = kv.find_more(second, 8, 39)
    assert num_tokens == 28
    kv.adopt(second, hit, 36)
    assert kv.room(second) == [36, 36]
    assert [len(blocks) for blocks in kv.held(second)] == [9, 2]
    kv.check()


def test_what_requests_need_counts_a_window_once() -> None:
    kv = KVManager(30, [spec(), window(6)])
    assert kv.num_needed(100, [[], []]) == 25 + 3
    assert kv.capacity == 26 * 4  # and three for the window
    owner = Owner("a", list(range(104)))
    advance(kv, owner, 4)
    assert kv.num_missing(owner, 104) == 0


def test_several_blocks_share_a_chain() -> None:
    """Links stand for as many tokens as the smallest block has; a larger one is known by its last."""
    kv = KVManager(60, [spec(12), window(9, 4)])
    owner = Owner("a", list(range(48)))
    advance(kv, owner, 12)
    assert len(owner.hashes) == 12
    assert kv.find_cached(Owner("b", [*range(30), *[0] * 18]), 47)[1] == 24
