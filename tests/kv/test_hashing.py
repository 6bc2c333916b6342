"""Equal hashes mean equal KV: same tokens, same tokens before them, same everything else that matters."""

from __future__ import annotations

from array import array

from quire.kv.hashing import RecentChains, chain_start, extend_hashes, extra_key, new_root

ROOT = new_root(b"test")


def hashes(tokens: list[int], block_size: int = 4, extra: bytes = b"") -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, array("i", tokens), len(tokens) // block_size, block_size, chain_start(ROOT, extra))
    return found


def test_a_block_is_named_by_all_tokens_up_to_its_end() -> None:
    one, other = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[0] != other[0]
    assert one[1] != other[1]  # same tokens, other past
    assert hashes([1, 2, 3, 4, 0, 0, 0, 0])[0] == one[0]
    assert hashes([1, 1, 1, 1] * 2)[0] != hashes([1, 1, 1, 1] * 2)[1]


def test_growing_gives_the_same_as_starting_over() -> None:
    tokens = array("i", range(40))
    found: list[bytes] = []
    for count in (0, 1, 1, 4, 10):
        parent = found[-1] if found else chain_start(ROOT, b"")
        extend_hashes(found, tokens, max(count, len(found)), 4, parent)
    assert found == hashes(list(range(40)))


def test_salt_adapter_and_media_keep_requests_apart() -> None:
    keys = [
        extra_key(None, None, []),
        extra_key("a", None, []),
        extra_key(None, "a", []),
        extra_key(None, None, [b"a"]),
        extra_key(None, None, [b"a", b"b"]),
        extra_key(None, None, [b"ab"]),
        extra_key("", None, []),
    ]
    assert len({hashes([1, 2, 3, 4], extra=key)[0] for key in keys}) == len(keys)


def test_roots_are_random_unless_seeded() -> None:
    assert new_root() != new_root()
    assert new_root(b"x") == new_root(b"x")


def test_chains_of_others_are_continued_as_far_as_the_tokens_are_the_same() -> None:
    recent = RecentChains(4)
    known = array("i", range(18))
    recent.keep(b"", known, hashes(list(known)))
    for tokens, blocks in (
        (list(range(18)), 4),
        (list(range(30)), 4),
        (list(range(8)), 2),
        (list(range(7)), 1),
        ([*range(11), 99, 12, 13, 14, 15], 2),
        ([*range(3), 99], 0),
        ([0, 1], 0),
    ):
        assert recent.common(b"", array("i", tokens)) == hashes(list(range(18)))[:blocks], tokens
    assert recent.common(b"salt", known) == []
    known.append(5)  # nothing holds on to its memory


def test_a_chain_grows_with_its_request() -> None:
    recent = RecentChains(4)
    tokens, found = array("i", range(8)), hashes(list(range(8)))
    recent.keep(b"", tokens, found)
    tokens.extend(range(8, 20))
    assert recent.common(b"", array("i", range(40))) == found
    found += hashes(list(range(20)))[2:]
    assert recent.common(b"", array("i", range(40))) == hashes(list(range(20)))


def test_the_oldest_chain_is_forgotten() -> None:
    recent = RecentChains(4, capacity=2)
    prompts = [[number] * 8 for number in range(3)]
    for number in (0, 1, 0, 2):
        recent.keep(b"", array("i", prompts[number]), hashes(prompts[number]))
    assert [len(recent.common(b"", array("i", prompt))) for prompt in prompts] == [2, 0, 2]
