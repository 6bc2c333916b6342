"""Collectives: the identity for one rank, and two real ranks that agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from quire.distributed.collectives import all_gather, all_reduce
from quire.distributed.topology import ALONE, Topology
from quire.foundation.errors import ConfigError


def test_one_rank_does_nothing() -> None:
    x = torch.randn(3, 4)
    assert all_reduce(x, ALONE) is x
    assert all_gather(x, ALONE) is x


def test_shares() -> None:
    assert Topology(1, 4).share(12, "num_attention_heads") == 3
    with pytest.raises(ConfigError, match=r"num_attention_heads must be a multiple of tensor_parallel_size=4, got 10"):
        Topology(0, 4).share(10, "num_attention_heads")
    with pytest.raises(ConfigError, match=r"\[0, 2\), got 2"):
        Topology(2, 2)


def _rank(rank: int, meeting: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    topology = Topology(rank, 2)
    x = torch.arange(4.0).view(2, 2) + 10 * rank
    gathered = all_gather(x.t(), topology)  # not contiguous
    torch.save((all_reduce(x, topology), gathered), f"{results}{rank}")
    dist.destroy_process_group()


def test_two_ranks_agree(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path / "meeting"), str(tmp_path / "result")), nprocs=2)
    for rank in range(2):
        total, gathered = torch.load(tmp_path / f"result{rank}", weights_only=True)
        assert torch.equal(total, torch.tensor([[10.0, 12.0], [14.0, 16.0]]))
        assert torch.equal(gathered, torch.tensor([[0.0, 2.0, 10.0, 12.0], [1.0, 3.0, 11.0, 13.0]]))
