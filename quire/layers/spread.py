"""Expert parallelism: each rank has some experts whole, instead of a part of every one.

All ranks see all tokens, since they share attention. So nothing is sent to an expert: each rank computes what its own
make of the tokens that chose them, and the sum over ranks that follows anyway brings it together. Experts that many
tokens choose may be on several ranks, which take turns by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.distributed.topology import Topology
from quire.kernels.moe.routes import Here

Placement = Sequence[Sequence[int]]
"""Of each rank the experts that it has, in the order of their slots."""


def placed(loads: Sequence[float], ranks: int, redundant: int = 0) -> list[list[int]]:
    """As evenly by load as can be told: experts with the most load a copy are copied, `redundant` times in all;
    then each copy, the heaviest first, goes to the rank with the least load that has room and not that expert."""
    copies = [1] * len(loads)
    for _ in range(redundant):
        most = max((one for one in range(len(loads)) if copies[one] < ranks), key=lambda one: loads[one] / copies[one])
        copies[most] += 1
    few, more = divmod(len(loads) + redundant, ranks)
    room = [few + (rank < more) for rank in range(ranks)]
    found: list[list[int]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    # What has many copies goes first, else there may be no rank left that lacks it.
    for one in sorted(range(len(loads)), key=lambda one: (-copies[one], -loads[one] / copies[one], one)):
        fitting = [rank for rank in range(ranks) if len(found[rank]) < room[rank]]
        for rank in sorted(fitting, key=lambda rank: (total[rank], -room[rank] + len(found[rank]), rank))[
            : copies[one]
        ]:
            found[rank].append(one)
            total[rank] += loads[one] / copies[one]
    if sum(map(len, found)) < sum(copies):  # the room that is left is on too few ranks: deal them out in turns
        every = [one for one in sorted(range(len(loads)), key=lambda one: -loads[one]) for _ in range(copies[one])]
        found = [every[rank::ranks] for rank in range(ranks)]
    return [sorted(own) for own in found]


class Spread:
    """Where experts are, as a rank sees it. redundant: copies besides the one that each has.

    Tables stay where they are when experts move: graphs read them.
    """

    def __init__(self, experts: int, topology: Topology, redundant: int, device: torch.device) -> None:
        self._topology, self.redundant = topology, redundant
        most = min(topology.size, 1 + redundant)
        self._slots = torch.full(
            (experts, most), -1, dtype=torch.int32, device=device
        )  # [experts, copies]: here, or -1
        self._copies = torch.ones(experts, dtype=torch.int32, device=device)
        self.loads = torch.zeros(experts, dtype=torch.int32, device=device)  # tokens that have come to each expert
        self.placement: list[list[int]] = []
        self.own: list[int] = []
        self.place(placed([1.0] * experts, topology.size, redundant))

    def place(self, placement: Placement) -> None:
        """Every expert is somewhere, and at most once on a rank, which has as many as before."""
        self.placement = [list(own) for own in placement]
        self.own = self.placement[self._topology.rank]
        slots = torch.full(self._slots.shape, -1, dtype=torch.int32)
        counts = [0] * len(slots)
        for rank, there in enumerate(placement):
            for slot, expert in enumerate(there):
                slots[expert, counts[expert]] = slot if rank == self._topology.rank else -1
                counts[expert] += 1
        self._slots.copy_(slots)
        self._copies.copy_(torch.tensor(counts, dtype=torch.int32))

    @property
    def here(self) -> Here:
        """What the choice of experts asks of it."""
        return Here(self._slots, self._copies, self.loads, len(self.own))

    def is_first_with(self, expert: int) -> bool:
        """Whether this rank is the first that has it."""
        return next(rank for rank, there in enumerate(self.placement) if expert in there) == self._topology.rank

    def rebalanced(self) -> list[list[int]] | None:
        """Where experts had better be, by what has come to them since the last time; None: where they are."""
        loads = self.loads.tolist()
        self.loads.zero_()
        if not any(loads):
            return None
        found = placed(loads, self._topology.size, self.redundant)
        return found if self._heaviest(found, loads) < self._heaviest(self.placement, loads) else None

    def _heaviest(self, placement: Placement, loads: Sequence[int]) -> float:
        copies = [sum(one in own for own in placement) for one in range(len(loads))]
        return max(sum(loads[one] / copies[one] for one in own) for own in placement)
