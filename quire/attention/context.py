"""StepContext: what the layers must know of a step, handed through `forward(x, ctx)`. No global state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.base import AttentionBackend, AttentionInputs, LayerCache, PromptAttention
from quire.attention.recurrent import StateCache
from quire.kernels.moe.routes import Live
from quire.kernels.recurrent.rows import Rows

__all__ = ["AttentionInputs", "EncoderContext", "GroupContext", "LayerCache", "StateCache", "StepContext"]


@dataclass(frozen=True, slots=True)
class GroupContext:
    """For layers that keep the same kind of thing, and so share a block table."""

    slots: torch.Tensor  # int32 [tokens]: block * block_size + offset where the token's KV goes
    backend: AttentionBackend  # of a group that keeps states one that only plans
    plan: Any  # what `backend.plan` returned for this step


@dataclass(frozen=True, slots=True)
class StepContext:
    positions: torch.Tensor  # int32 [tokens]
    caches: list[LayerCache | StateCache]  # one a layer that keeps something
    groups: list[GroupContext]

    @property
    def live(self) -> Live | None:
        """Which tokens are somebody's: what lies in the null block is nobody's. None where no keys are kept."""
        cache = next((cache for cache in self.caches if isinstance(cache, LayerCache)), None)
        group = next((group for group in self.groups if not isinstance(group.plan, Rows)), None)
        return Live(group.slots, cache.k.shape[2]) if cache and group else None


@dataclass(frozen=True, slots=True)
class EncoderContext:
    """The same for encoders: whole prompts, of which nothing is kept."""

    positions: torch.Tensor  # int32 [tokens]
    token_types: torch.Tensor | None  # int32 [tokens]; None: all 0
    backend: PromptAttention
    plan: Any  # what `backend.plan` returned for this step
