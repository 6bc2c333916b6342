"""Where whole experts are: every one somewhere, none twice on a rank, and loads as even as can be."""

from __future__ import annotations

import random

import pytest
import torch

from quire.distributed.topology import Topology
from quire.layers.spread import Spread, placed

CPU = torch.device("cpu")


def heaviest(placement: list[list[int]], loads: list[float]) -> float:
    copies = [sum(one in own for own in placement) for one in range(len(loads))]
    return max(sum(loads[one] / copies[one] for one in own) for own in placement)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_expert_is_somewhere(ranks: int) -> None:
    rng = random.Random(ranks)
    for _ in range(50):
        experts = rng.randrange(ranks, 65)
        redundant = rng.randrange((ranks - 1) * experts + 1) if rng.random() < 0.3 else rng.randrange(9)
        loads = [rng.paretovariate(0.8) for _ in range(experts)]
        found = placed(loads, ranks, min(redundant, (ranks - 1) * experts))
        assert {one for own in found for one in own} == set(range(experts))
        assert all(len(set(own)) == len(own) for own in found)
        sizes = [len(own) for own in found]
        assert sum(sizes) == experts + min(redundant, (ranks - 1) * experts)
        assert max(sizes) - min(sizes) <= 1


def test_copies_of_the_busiest_make_loads_even() -> None:
    loads = [100.0, *[10.0] * 15]
    even, copied = placed([1.0] * 16, 4), placed(loads, 4, 4)
    assert heaviest(even, loads) >= 130
    assert sum(0 in own for own in copied) == 4
    assert heaviest(copied, loads) <= 1.15 * sum(loads) / 4


def test_experts_stay_where_that_is_no_worse() -> None:
    spread = Spread(8, Topology(0, 2, True), 0, CPU)
    assert spread.rebalanced() is None  # nothing has come
    spread.loads.fill_(5)
    assert spread.rebalanced() is None
    own = spread.own
    spread.loads[own] = torch.tensor([90, 80, 3, 2], dtype=torch.int32)
    found = spread.rebalanced()
    assert found is not None
    assert not {own[0], own[1]} <= set(found[0])
    assert not spread.loads.any()
