"""Sums and gathers over the ranks of a topology: nothing at all for one rank, torch.distributed's otherwise."""

from __future__ import annotations

import torch
import torch.distributed as dist

from quire.distributed.topology import Topology


def all_reduce(x: torch.Tensor, topology: Topology) -> torch.Tensor:
    """The sum of all ranks' x, in place. The default process group must be up if there is more than one rank."""
    if topology.size > 1:
        dist.all_reduce(x)
    return x


def all_gather(x: torch.Tensor, topology: Topology) -> torch.Tensor:
    """All ranks' x [..., n], side by side in rank order: [..., size * n]."""
    if topology.size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(topology.size)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=-1)
