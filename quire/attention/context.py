"""StepContext: what the layers must know of a step, handed through `forward(x, ctx)`. No global state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.base import AttentionBackend, AttentionInputs, LayerCache, PromptAttention

__all__ = ["AttentionInputs", "GroupContext", "LayerCache", "StepContext"]


@dataclass(frozen=True, slots=True)
class GroupContext:
    """For layers that keep the same kind of thing, and so share a block table."""

    slots: torch.Tensor  # int32 [tokens]: block * block_size + offset where the token's KV goes
    backend: AttentionBackend | PromptAttention
    plan: Any  # what `backend.plan` returned for this step


@dataclass(frozen=True, slots=True)
class StepContext:
    """Of whole prompts that nothing is kept of (encoders), the caches are scratch memory for the step's own keys and
    values, a slot a token, which the layers write one after the other."""

    positions: torch.Tensor  # int32 [tokens]
    caches: list[LayerCache]  # one a layer
    groups: list[GroupContext]
    token_types: torch.Tensor | None = None  # int32 [tokens], of prompts that are pairs; None: all 0
