"""The ranks that share a model, or the layers of one stage: where they meet, and what they do together.

On a CPU they talk through gloo, on GPUs through NCCL; small messages of GPUs go through kernels of ours
(`quire/kernels/across_ranks.py`), which find their memory here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from quire.distributed.contexts import Contexts
from quire.distributed.peer_memory import Layout, PeerMemory
from quire.distributed.stages import Pipeline
from quire.distributed.sums_under_way import MakeAdd, Steps, SumsUnderWay, Travel
from quire.distributed.topology import Topology
from quire.types.ranks import Rank

# The addresses of one host are enough, and a switch that adds up by multicast is not wanted: it can fail for all
# processes of a host at once.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


class Group:
    """This process as one of the ranks. Every call is made by all of them, in the same order."""

    def __init__(
        self, rank: Rank, device: torch.device, *, whole_experts: bool = False, redundant_experts: int = 0
    ) -> None:
        """Waits for the others. whole_experts, redundant_experts: see `Topology`."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.topology = Topology(rank.lane, rank.width, whole_experts, redundant_experts)
        self.samples = rank.samples
        self.device = device
        self.peers: PeerMemory | None = None
        self.under_way: SumsUnderWay | None = None
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=rank.meeting if "://" in rank.meeting else f"file://{rank.meeting}",
            rank=rank.index,
            world_size=rank.size,
            device_id=device if device.type == "cuda" else None,
        )
        self.pipeline: Pipeline | None = None
        self.contexts: Contexts | None = None
        everybody = dist.group.WORLD
        assert everybody is not None
        self._everybody: dist.ProcessGroup = everybody
        self._ranks = everybody
        self._first = rank.index - rank.lane  # of them, among all
        if rank.width < rank.size:
            self._ranks = _own([range(first, first + rank.width) for first in range(0, rank.size, rank.width)])
        if rank.stages > 1:
            links = _own([range(rank.size)]), _own([range(rank.size)])
            self.pipeline = Pipeline(rank, device, links)
        if rank.contexts > 1:
            alike = _own([range(lane, rank.size, rank.width) for lane in range(rank.width)])
            self.contexts = Contexts(rank.context, rank.contexts, device, alike)

    def share_memory(self, layout: Layout, large: tuple[Steps, MakeAdd] | None = None) -> None:
        """Let kernels write into other ranks' memory, where they can. large: steps whose sums are to be under way."""
        if self.device.type == "cuda" and layout.hidden * layout.itemsize % 4 == 0:
            self.peers = PeerMemory.on_gpu(layout, self.topology, self.device, self._ranks)
        if self.peers is not None and large is not None:
            steps, make_add = large
            travel = Travel.on_gpu(steps, self.topology, make_add, self.device, self._ranks)
            self.under_way = SumsUnderWay(steps, travel.rows, travel)

    def reduce_add(self, partial: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual += the sum of all ranks' partial`, in place; both [m, n], contiguous. May overwrite `partial`.

        Every rank gets the same bits.
        """
        if self.device.type == "cuda":  # each sum is made in one place and sent to all
            dist.all_reduce(partial, group=self._ranks)
            return residual.add_(partial)
        total = residual.float()
        for part in self._all(partial):
            total += part
        return residual.copy_(total)

    def gather_columns(self, part: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out [m, n] = all ranks' part [m, s] side by side, as far as there is room; what counts is the first rank's
        out."""
        size, (rows, width) = self.topology.size, part.shape
        if self.device.type == "cuda":
            every = torch.empty((size, rows, width), dtype=part.dtype, device=part.device)
            dist.all_gather_into_tensor(every, part, group=self._ranks)
            parts = list(every.unbind())
        else:
            first = self.topology.rank == 0
            parts = [torch.empty_like(part) for _ in range(size)] if first else []
            dist.gather(part, parts or None, dst=self._first, group=self._ranks)
        for rank, one in enumerate(parts):
            room = out[:, rank * width : (rank + 1) * width]
            room.copy_(one[:, : room.shape[1]])
        return out

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """x of the first rank, in place, contiguous; of the first copy's, where there are several."""
        if self.contexts is not None:
            dist.broadcast(x, 0, group=self._everybody)
        else:
            dist.broadcast(x, self._first, group=self._ranks)
        return x

    def from_rank(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """x of that rank, contiguous, of any type; in place on the others. For what is rare."""
        dist.broadcast(x.view(torch.uint8) if x.dtype.itemsize == 1 else x, self._first + rank, group=self._ranks)
        return x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x added up, in place, contiguous; the same bits everywhere. For what is rare."""
        dist.all_reduce(x, group=self._ranks)
        return x

    def smallest(self, *values: int) -> list[int]:
        """Of each value the least that any rank has, those of other stages too."""
        every = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(every, dist.ReduceOp.MIN)
        return [int(value) for value in every.tolist()]

    def close(self) -> None:
        self.peers = self.under_way = self.pipeline = self.contexts = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.topology.size)]
        dist.all_gather(parts, x, group=self._ranks)
        return parts


def _own(every: Sequence[range]) -> dist.ProcessGroup:
    """Which of these groups of ranks this process is in. All ranks make all of them."""
    own: dist.ProcessGroup | None = None
    for ranks in every:
        made = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            assert isinstance(made, dist.ProcessGroup)
            own = made
    assert own is not None
    return own
