"""What is whose."""

from __future__ import annotations

import pytest

from quire.distributed.topology import Share, Topology
from quire.foundation.errors import ConfigError


def test_shares() -> None:
    assert Topology(1, 4).share(12, "num_attention_heads") == 3
    with pytest.raises(ConfigError, match=r"num_attention_heads must be a multiple of tensor_parallel_size=4, got 10"):
        Topology(0, 4).share(10, "num_attention_heads")
    with pytest.raises(ConfigError, match=r"\[0, 2\), got 2"):
        Topology(2, 2)


@pytest.mark.parametrize(
    ("size", "heads", "first_lines"),
    [(1, 2, [0]), (2, 4, [0, 16]), (4, 2, [0, 0, 8, 8]), (4, 1, [0, 0, 0, 0]), (4, 4, [0, 8, 16, 24])],
)
def test_each_rank_has_the_heads_that_its_queries_need(size: int, heads: int, first_lines: list[int]) -> None:
    shares = [Topology(rank, size).lines(8 * heads, heads, "heads") for rank in range(size)]
    room = 8 * max(heads // size, 1)
    assert shares == [Share(begin, begin + room, room) for begin in first_lines]


def test_heads_that_neither_divide_nor_are_divided() -> None:
    with pytest.raises(ConfigError, match=r"heads must be a multiple of tensor_parallel_size=4, got 3"):
        Topology(0, 4).lines(24, 3, "heads")


@pytest.mark.parametrize(("size", "total"), [(1, 97), (2, 97), (4, 97), (3, 128256), (8, 151936), (4, 5), (2, 331)])
def test_a_vocabulary_is_shared_out_whole_and_every_rank_has_as_much_room(size: int, total: int) -> None:
    shares = [Topology(rank, size).padded(total) for rank in range(size)]
    assert [line for begin, end, _ in shares for line in range(begin, end)] == list(range(total))
    assert len({share.room for share in shares}) == 1
    assert all(share.begin in (rank * share.room, total) for rank, share in enumerate(shares))
    if total > 1000:
        assert shares[0].room % 16 == 0 or size == 1
