"""SeatDrafts: what is drafted for each seat, and the steps that verify it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from quire.config.speculative import DRAFTERS, SpeculativeConfig
from quire.distributed.group import Group
from quire.kernels.across_ranks import from_first
from quire.kernels.drafts import DraftBuffers, DraftState, commit_drafted, gather_drafted, probe
from quire.kernels.step.step import StepBuffers, scatter
from quire.types.plan import Admit
from quire.worker.drafters import Drafter, DrafterSetup
from quire.worker.seats import DeviceSeats
from quire.worker.staging import ALIGNED, Staging

MAX_TOKENS = 1024  # of a step with drafts: their logits are kept all at once


def drafted_rows(max_seats: int, max_tokens: int, width: int) -> int:
    """Most rows of a step with drafts. max_tokens: of any step."""
    return min(max_seats, min(max_tokens, MAX_TOKENS) // width)


def told_drafts(max_seats: int, num_drafts: int) -> int:
    """Numbers that say what is drafted for all seats."""
    return _places(max_seats) * (num_drafts + 2)


def _places(max_seats: int) -> int:
    """Of seats, and of nobody, so many that each array begins at a round address."""
    return -(-(max_seats + 1) // ALIGNED) * ALIGNED


class SeatDrafts:
    """Of several ranks the first one drafts, and tells the others at the beginning of a step with drafts: so nothing
    that it alone knows (logits processors, a drafter of somebody else's) can make them drift apart.

    seats: made with `limited`; max_rows: of any step; max_seats, max_tokens: what the engine was told. group: None:
    this is the only rank.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        seats: DeviceSeats,
        max_seats: int,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        group: Group | None = None,
    ) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        assert seats.state.limit is not None
        self._seats, self._limit = seats.state, seats.state.limit
        num_drafts = config.num_speculative_tokens
        places, self._group = _places(max_seats), group
        self._told = ints(told_drafts(max_seats, num_drafts))  # all of the state
        drafted, count, may_draft = self._told.split([places * num_drafts, places, places])
        self.state = DraftState(drafted.view(places, num_drafts), count, may_draft)
        self.width = self.state.width
        self.max_rows = drafted_rows(max_seats, max_tokens, self.width)
        tokens = self.max_rows * self.width
        self._buffers = DraftBuffers(ints(tokens), ints(tokens), ints(self.max_rows), ints(self.max_rows))
        self.outcome = ints(max_rows, self.width + 2)  # of the latest step, see `kernels.drafts`
        self._drafter: Drafter | None = None  # of a rank that is told
        if group is None or group.samples:
            self._drafter = DRAFTERS.get(config.method)(DrafterSetup(config, seats.state, self.state, max_rows, device))
        self._staging = Staging(3 * (max_seats + ALIGNED), device)

    @property
    def max_tokens(self) -> int:
        """Of a step with drafts."""
        return self.max_rows * self.width

    def admit(self, admits: Sequence[Admit], undrafted: Collection[int]) -> None:
        """Take over newly seated requests; undrafted: seats for which nothing is drafted whatever the plan says."""
        if not admits:
            return
        seats = np.array([admit.seat for admit in admits], dtype=np.int32)
        may_draft = np.array([admit.may_draft and admit.seat not in undrafted for admit in admits], dtype=np.int32)
        limits = np.array([admit.limit for admit in admits], dtype=np.int32)
        index, *values = (self._staging.put(column) for column in (seats, may_draft, limits))
        self._staging.send()
        for target, span in zip((self.state.may_draft, self._limit), values, strict=True):
            scatter(target, self._staging.view(index), self._staging.view(span))

    def buffers(self, rows: int) -> DraftBuffers:
        """Those of the first rows: always the same memory."""
        whole, tokens = self._buffers, rows * self.width
        return DraftBuffers(whole.seats[:tokens], whole.lengths[:tokens], whole.first_lens[:rows], whole.used[:rows])

    def gather(self, out: StepBuffers, seats: torch.Tensor) -> None:
        """The inputs of a step of these rows, each with its drafts."""
        if self._group is not None:
            from_first(self._told, self._group, "drafts")
        gather_drafted(self._seats, self.state, out, self.buffers(len(seats)), seats)

    def commit(self, out: StepBuffers, seats: torch.Tensor, sampled: torch.Tensor) -> None:
        """Its end: the drafts that were right count, and others are made. sampled: int32 [rows * width], the same on
        every rank."""
        rows = len(seats)
        commit_drafted(self._seats, self.outcome[:rows], self.buffers(rows), seats, out.input_ids, sampled)
        self._propose(seats)

    def follow(self, seats: torch.Tensor, tokens: torch.Tensor, num_decodes: int) -> None:
        """The end of a step without drafts, when `commit` has told its tokens: what drafts would have brought is noted,
        and others are made."""
        probe(self.state, self.outcome[: len(seats)], seats, tokens, num_decodes)
        self._propose(seats)

    def _propose(self, seats: torch.Tensor) -> None:
        if self._drafter is not None:
            self._drafter.propose(seats)
