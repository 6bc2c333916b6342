"""Who drafts: one class a method, found by its name (`config.speculative.DRAFTERS`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.config.speculative import SpeculativeConfig
from quire.kernels.drafts import DraftState, propose_ngram
from quire.kernels.step.step import SeatState


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """What a drafter is made with. It writes `drafts`, and reads all else."""

    config: SpeculativeConfig
    seats: SeatState
    drafts: DraftState
    max_rows: int  # of any step
    device: torch.device


class Drafter(Protocol):
    def __init__(self, setup: DrafterSetup) -> None:
        """Allocate what is needed; nothing is allocated later."""
        ...

    def propose(self, seats: torch.Tensor) -> None:
        """Write `drafts.tokens` and `drafts.count` of these seats, int32 [rows], 0 for padding.

        Asked when a step has committed its tokens: the text of a request is then the `num_computed` tokens that the
        history holds, and `last_token`. Of rows in the middle of a prompt nothing is used. Of several ranks the first
        alone is asked. Captured in CUDA graphs: launches depend on shapes only, and nothing is read back.
        """
        ...


class NgramDrafter:
    """What followed the same tokens before, in the request's own text."""

    def __init__(self, setup: DrafterSetup) -> None:
        self._setup = setup
        self._keys = torch.zeros(setup.max_rows, dtype=torch.int32, device=setup.device)

    def propose(self, seats: torch.Tensor) -> None:
        config = self._setup.config
        propose_ngram(
            self._setup.seats, self._setup.drafts, seats, self._keys[: len(seats)], config.prompt_lookup_max,
            config.prompt_lookup_min,
        )  # fmt: skip
