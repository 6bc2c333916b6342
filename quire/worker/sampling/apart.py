"""Tokens of plain steps, drawn by all ranks from their own parts of the logits."""

from __future__ import annotations

import numpy as np
import torch

from quire.distributed.peer_memory import PeerMemory
from quire.kernels.sampling.apart import draw_apart
from quire.kernels.sampling.state import Stats
from quire.types.plan import StepPlan
from quire.worker.sampling.columns import Columns


class ApartDraws:
    """Whether a step may be drawn so follows from plans alone, which are the same on every rank.

    Nothing that only the first rank knows may matter: an engine with logits processors does without this.
    """

    def __init__(self, columns: Columns, peers: PeerMemory) -> None:
        """peers: with logits. A rank's own part lies in its own first columns."""
        assert peers.logits is not None
        self._columns, self._peers = columns, peers
        self._parts = peers.logits[:, : peers.topology.padded(peers.layout.vocab).room]
        self._stats = Stats.allocate(len(self._parts), self._parts.shape[1], peers.device)

    def suffice(self, plan: StepPlan, seats: np.ndarray) -> bool:
        """Whether the rows of these seats, all that the plan samples, want nothing else."""
        return not plan.awaits_masks and self._columns.is_plain(seats)

    def part(self, rows: int) -> torch.Tensor:
        """Where this rank's logits of so many rows lie, float32 [rows, columns]."""
        return self._parts[:rows]

    def draw(self, seats: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
        """As `Sampler.sample_plain`, of the first rows; the same tokens on every rank."""
        draw_apart(self.part(len(out)), self._columns.device, seats, lengths, out, self._stats, self._peers)
