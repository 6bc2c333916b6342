"""StepContext: what the layers must know of a step, handed through `forward(x, ctx)`. No global state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.base import AttentionBackend, AttentionInputs, LayerCache, PromptAttention

__all__ = ["AttentionInputs", "EncoderContext", "GroupContext", "LayerCache", "StepContext"]


@dataclass(frozen=True, slots=True)
class GroupContext:
    """For layers that keep the same kind of thing, and so share a block table."""

    slots: torch.Tensor  # int32 [tokens]: block * block_size + offset where the token's KV goes
    backend: AttentionBackend
    plan: Any  # what `backend.plan` returned for this step


@dataclass(frozen=True, slots=True)
class StepContext:
    positions: torch.Tensor  # int32 [tokens]
    caches: list[LayerCache]  # one a layer
    groups: list[GroupContext]


@dataclass(frozen=True, slots=True)
class EncoderContext:
    """The same for encoders: whole prompts, of which nothing is kept."""

    positions: torch.Tensor  # int32 [tokens]
    token_types: torch.Tensor | None  # int32 [tokens]; None: all 0
    backend: PromptAttention
    plan: Any  # what `backend.plan` returned for this step
