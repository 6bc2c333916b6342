"""The device arrays that `kernels/step/step.py` reads and writes. Everything is int32."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SeatState:
    """What a step reads and writes of all seats."""

    last_token: torch.Tensor  # [seats]
    num_computed: torch.Tensor  # [seats]
    block_table: torch.Tensor  # [seats, max_blocks]
    token_of_slot: torch.Tensor  # [num_blocks * block_size]: the token whose KV is there
    block_size: int
    # [seats]: tokens at which a request ends, 0: any number; None: nobody need know. Where rows advance by several
    # tokens, a step may hold a row that has reached its limit in the step before: what it has is written nowhere.
    limit: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class GroupTable:
    """Where the KV of one group of layers lies."""

    blocks: torch.Tensor  # [seats, max_blocks]
    block_size: int


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Inputs of the forward pass, filled by `gather`."""

    input_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]
    seq_lens: torch.Tensor  # [rows]
