"""Staging: views hold what was put, a full buffer is an error, and seats survive very long block lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.types.plan import Admit, NewBlocks, StepPlan
from quire.types.sampling import SamplingParams
from quire.worker.graphs import graph_rows
from quire.worker.seats import DeviceSeats
from quire.worker.staging import Staging

CPU = torch.device("cpu")


def test_views_hold_what_was_put() -> None:
    staging = Staging(16, CPU)
    for round_ in range(10):
        first = staging.put([round_, 2])
        second = staging.put(np.arange(5))
        staging.send()
        assert staging.view(first).tolist() == [round_, 2]
        assert staging.view(second).tolist() == [0, 1, 2, 3, 4]


def test_a_full_buffer_is_an_error() -> None:
    staging = Staging(4, CPU)
    staging.put([1, 2, 3])
    with pytest.raises(ValueError, match="holds 4"):
        staging.put([4, 5])


def test_more_blocks_than_one_copy_holds() -> None:
    blocks = np.arange(1, 501, dtype=np.int32)
    seats = DeviceSeats(4, 500, torch.zeros(16, dtype=torch.int32), 16, CPU)
    staging = Staging(200, CPU)
    plan = StepPlan(
        step=1,
        admits=[Admit(3, 496, 500, SamplingParams(), [], 0)],
        seats=np.array([3], dtype=np.int32),
        num_tokens=np.array([4], dtype=np.int32),
        num_decodes=0,
        token_ids=np.arange(4, dtype=np.int32),
        samples=np.array([True]),
        blocks=[NewBlocks(np.full(500, 3, np.int32), np.arange(500, dtype=np.int32), blocks)],
        max_seq_len=500,
    )
    writes = seats.stage(plan, staging)
    staging.send()
    seats.apply(writes, staging)
    assert seats.state.block_table[3].tolist() == blocks.tolist()
    assert not seats.state.block_table[[0, 1, 2, 4]].any()
    assert seats.state.num_computed.tolist() == [0, 0, 0, 496, 0]


@pytest.mark.parametrize("most", [512, 1000, 1024, 4096])
def test_every_batch_has_a_graph_with_little_padding(most: int) -> None:
    """Also the largest: a step that is launched kernel by kernel takes three times as long for a small model."""
    sizes = graph_rows(most, [])
    assert sizes[:4] == [1, 2, 4, 8]
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(s for s in sizes if s >= rows)
        assert size - rows < size / 2 if rows <= 128 else size - rows < size / 3
    assert len(sizes) <= 19 + max(most - 1024, 0) // 128  # each is captured at start
    assert graph_rows(3, []) == [1, 2, 3]
    assert graph_rows(100, [7, 200, 3]) == [3, 7]
