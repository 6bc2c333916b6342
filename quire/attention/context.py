"""StepContext: what the layers must know of a step, handed through `forward(x, ctx)`. No global state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from quire.attention.base import AttentionBackend, AttentionInputs, LayerCache, PromptAttention
from quire.attention.recurrent import StateCache
from quire.distributed.sums_under_way import SumsUnderWay
from quire.kernels.moe.routes import Live
from quire.kernels.recurrent.rows import Rows

__all__ = ["AttentionInputs", "GroupContext", "LayerCache", "StateCache", "StepContext"]


@dataclass(frozen=True, slots=True)
class GroupContext:
    """For layers that keep the same kind of thing, and so share a block table."""

    slots: torch.Tensor  # int32 [tokens]: block * block_size + offset where the token's KV goes
    # Of a group that keeps states one that only plans.
    backend: AttentionBackend | PromptAttention
    plan: Any  # what `backend.plan` returned for this step
    inputs: AttentionInputs | None = None  # that it was made of; None: attention is to all of the step's tokens at once
    _pieces: dict[int, Any] = field(default_factory=dict, init=False)

    def plan_of(self, first: int, last: int) -> Any:
        """The same for tokens first … last - 1 alone; see `AttentionInputs.piece`."""
        if first not in self._pieces:
            assert self.inputs is not None
            self._pieces[first] = cast("AttentionBackend", self.backend).plan(self.inputs.piece(first, last))
        return self._pieces[first]


@dataclass(frozen=True, slots=True)
class StepContext:
    """Of whole prompts that nothing is kept of (encoders), the caches are scratch memory for the step's own keys and
    values, a slot a token, which the layers write one after the other."""

    positions: torch.Tensor  # int32 [tokens]
    caches: list[LayerCache | StateCache]  # one a layer that keeps something
    groups: list[GroupContext]
    token_types: torch.Tensor | None = None  # int32 [tokens], of prompts that are pairs; None: all 0
    whole_prompts: bool = False
    under_way: SumsUnderWay | None = None  # of a step whose sums over ranks are; None: each is there when it is made

    def pieces(self, residual: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Tokens, and their rows of the residual stream: all at once, or as sums arrive that are under way."""
        if self.under_way is None:
            return iter([(slice(None), residual)])
        return self.under_way.pieces(residual)

    @property
    def live(self) -> Live | None:
        """Which tokens are somebody's: what lies in the null block is nobody's. None where no keys are kept, and of
        whole prompts, which come without padding."""
        if self.whole_prompts:
            return None
        cache = next((cache for cache in self.caches if isinstance(cache, LayerCache)), None)
        group = next((group for group in self.groups if not isinstance(group.plan, Rows)), None)
        return Live(group.slots, cache.k.shape[2]) if cache and group else None
