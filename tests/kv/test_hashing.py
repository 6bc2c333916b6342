"""Equal hashes mean equal KV: same tokens, same tokens before them, same everything else that matters."""

from __future__ import annotations

from array import array

from quire.kv.hashing import chain_start, extend_hashes, extra_key, new_root

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
