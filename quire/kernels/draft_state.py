"""The device arrays that `kernels/drafts.py` reads and writes. Everything is int32."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftState:
    """What is drafted for each seat."""

    tokens: torch.Tensor  # [seats, drafts]: what may follow the last token
    count: torch.Tensor  # [seats]: how many of them there are
    may_draft: torch.Tensor  # [seats]: 0 or 1

    @property
    def width(self) -> int:
        """Query tokens of a row: the last token and its drafts."""
        return 1 + self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class DraftBuffers:
    """What `gather_drafted` tells beside the inputs of the forward pass; token t is query t % width of row t // width.

    A row has fewer drafts than its width has room for where fewer were made, and near its limit. The queries behind are
    padding: they see what the last one sees, and are written nowhere.
    """

    seats: torch.Tensor  # [tokens]
    lengths: torch.Tensor  # [tokens]: that the request has, up to the query
    first_lens: torch.Tensor  # [rows]: that a row's first query sees
    used: torch.Tensor  # [rows]: drafts; -1: the row has reached its limit, and nothing of it counts
