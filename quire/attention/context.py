"""StepContext: what the layers must know of a step, handed through `forward(x, ctx)`. No global state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.base import AttentionBackend, AttentionInputs, LayerCache

__all__ = ["AttentionInputs", "LayerCache", "StepContext"]


@dataclass(frozen=True, slots=True)
class StepContext:
    positions: torch.Tensor  # int32 [tokens]
    slots: torch.Tensor  # int32 [tokens]: block * block_size + offset where the token's KV goes
    caches: list[LayerCache]  # one a layer
    backend: AttentionBackend
    plan: Any  # what `backend.plan` returned for this step
