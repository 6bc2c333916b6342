"""Equal hashes mean equal KV: same tokens, same tokens before them, same everything else that matters."""

from __future__ import annotations

from array import array

import pytest

from quire.kv.hashing import NAME_BYTES, BlockHasher, RecentChains, extra_key

HASHER = BlockHasher(b"test")


def hashes(tokens: list[int], block_size: int = 4, extra: bytes = b"", hasher: BlockHasher = HASHER) -> list[bytes]:
    found: list[bytes] = []
    hasher.extend(found, array("i", tokens), len(tokens) // block_size, block_size, extra)
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
        HASHER.extend(found, tokens, count, 4, b"")
    HASHER.extend(found, tokens, 3, 4, b"")  # known already
    assert found == hashes(list(range(40)))
    tokens.append(5)  # nothing holds on to its memory


def test_beginnings_of_any_length_have_names_of_their_own() -> None:
    """Also of zeros, which add nothing to a sum that is not careful, and of the smallest differences."""
    prompts = [[0] * 64, [0] * 60 + [1] * 4, [1] * 64, [2**31 - 1] * 64, [0, 1] * 32, [1, 0] * 32]
    prompts += [[7] * i + [8] + [7] * (63 - i) for i in range(64)]
    names = [name for prompt in prompts for name in hashes(prompt, 1)]
    beginnings = {tuple(prompt[: i + 1]) for prompt in prompts for i in range(64)}
    assert len(set(names)) == len(beginnings)
    assert {len(name) for name in names} == {NAME_BYTES}


@pytest.mark.parametrize("count", [1 << 14, (1 << 14) + 4, 40_000])
def test_names_of_long_prompts_are_those_of_their_beginnings(count: int) -> None:
    """The key grows with the longest prompt seen, and does not change."""
    tokens = [i * 7919 % 128_000 for i in range(count)]
    short, long = BlockHasher(b"test"), hashes(tokens, hasher=BlockHasher(b"test"))
    assert long[:100] == hashes(tokens[:400], hasher=short)
    assert long == hashes(tokens, hasher=short)
    assert len(set(long)) == len(long)


def test_a_name_is_the_sums_that_it_is_said_to_be() -> None:
    tokens = [5, 0, 128_000, 2**31 - 1, 3, 3, 3, 3]
    lanes = HASHER._lanes(len(tokens)).tolist()
    start = [int.from_bytes(HASHER._start(b"x")[i : i + 8], "little") for i in range(0, NAME_BYTES, 8)]
    for count, name in zip((4, 8), hashes(tokens, extra=b"x"), strict=True):
        sums = [
            one + sum(lane[i] * (token + 1) for i, token in enumerate(tokens[:count]))
            for one, lane in zip(start, lanes, strict=True)
        ]
        assert name == b"".join((one % 2**64).to_bytes(8, "little") for one in sums)


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


def test_keys_are_random_unless_seeded() -> None:
    tokens = [1, 2, 3, 4]
    assert hashes(tokens, hasher=BlockHasher()) != hashes(tokens, hasher=BlockHasher())
    assert hashes(tokens, hasher=BlockHasher(b"x")) == hashes(tokens, hasher=BlockHasher(b"x"))
    assert hashes(tokens, hasher=BlockHasher(b"x")) != hashes(tokens)


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
