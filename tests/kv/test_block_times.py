"""How long blocks live and lie idle, against a clock that the test moves."""

from __future__ import annotations

import pytest

from quire.config.engine import EngineConfig
from quire.foundation.errors import ConfigError
from quire.kv.block_pool import BlockPool
from quire.kv.block_times import BlockTimes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_block_is_followed_from_taking_to_eviction() -> None:
    clock, pool = Clock(), BlockPool(3)
    times = pool.times = BlockTimes(1.0, clock)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    clock.now = 5.0
    pool.free([second, first])  # the second holds nothing that anybody could find: it is no eviction
    clock.now = 7.0
    pool.touch(pool.find([b"a"]))
    assert times.take() == ([], [], [2.0])
    clock.now = 8.0
    pool.free([first])
    clock.now = 20.0
    pool.allocate(2)
    assert times.take() == ([20.0], [12.0], [])
    assert times.take() == ([], [], [])
    pool.check()


def test_only_a_share_is_followed() -> None:
    pool = BlockPool(2001)
    times = pool.times = BlockTimes(0.1, Clock())
    blocks = pool.allocate(2000)
    for number, block in enumerate(blocks):
        pool.register(block, str(number).encode())
    pool.free(blocks)
    pool.allocate(2000)
    assert 120 < len(times.take()[0]) < 280


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="kv_cache_metrics_sample"):
        EngineConfig.from_flat(kv_cache_metrics_sample=share)
