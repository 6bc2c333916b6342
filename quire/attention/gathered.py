"""Attention of a step whose tokens are computed by several copies of the model: each writes the keys and values of its
own tokens to scratch memory, copies exchange these, and every copy's cache gets those of all tokens.

To the layers this is a cache and a backend like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from quire.attention.base import ALIKE, AttentionBackend, ExpandingBackend, PerHead
from quire.attention.context import LayerCache
from quire.distributed.contexts import Contexts


@dataclass(frozen=True, slots=True)
class GatheredCache(LayerCache):
    """Scratch memory for a layer's own tokens: blocks of one slot, of which the first is nobody's.

    kept: the layer's cache; planes: what k and v are views of, see `scratch_beside`.
    """

    kept: LayerCache
    planes: torch.Tensor


def scratch_beside(kept: LayerCache, tokens: int) -> torch.Tensor:
    """Room for the keys and values of so many own tokens, or for the latent rows that are both:
    [tokens + 1, planes, kv_heads, 1, head_dim]."""
    _, kv_heads, _, head_dim = kept.k.shape
    planes = 1 if kept.v.data_ptr() == kept.k.data_ptr() else 2
    return torch.empty((tokens + 1, planes, kv_heads, 1, head_dim), dtype=kept.k.dtype, device=kept.k.device)


def gathered_cache(kept: LayerCache, planes: torch.Tensor) -> GatheredCache:
    """planes: as `scratch_beside` makes them; layers that run one after the other may use the same."""
    k = planes[:, 0]
    v = planes[:, 1] if planes.shape[1] > 1 else k[..., : kept.v.shape[3]]
    return GatheredCache(k=k, v=v, kept=kept, planes=planes)


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """own: the backend's plan for the tokens of this copy. lines: int32 [tokens of the step], the place of each among
    the scratch slots of all copies, one copy behind the other; blocks, offsets: int64, likewise, where it goes in the
    caches of the group. done: ids of caches that are up to date, for a layer may attend to what another keeps."""

    own: Any
    lines: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    done: set[int] = field(default_factory=set)


class GatheringAttention:
    """As the backend that it stands before."""

    def __init__(self, backend: AttentionBackend, contexts: Contexts) -> None:
        self._backend, self._contexts = backend, contexts

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: GatheredPlan, scale: float, heads: PerHead = ALIKE
    ) -> torch.Tensor:
        """See `AttentionBackend`. q: of the own tokens."""
        return self._backend.run(q, self._kept(cache, plan), plan.own, scale, heads)

    def absorbed(self, plan: GatheredPlan) -> int | None:
        """See `ExpandingBackend`."""
        return self._backend.absorbed(plan.own) if isinstance(self._backend, ExpandingBackend) else None

    def run_expanded(
        self, q: torch.Tensor, cache: LayerCache, weight: torch.Tensor, plan: GatheredPlan, scale: float,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        assert isinstance(self._backend, ExpandingBackend)
        self._backend.run_expanded(q, self._kept(cache, plan), weight, plan.own, scale, out)

    def _kept(self, cache: LayerCache, plan: GatheredPlan) -> LayerCache:
        """The layer's cache, up to date."""
        assert isinstance(cache, GatheredCache)
        if id(cache) not in plan.done:
            plan.done.add(id(cache))
            self._keep(cache, plan)
        return cache.kept

    def _keep(self, cache: GatheredCache, plan: GatheredPlan) -> None:
        every = _plain(self._contexts.gather(cache.planes)).flatten(0, 1)
        rows = every.index_select(0, plan.lines).squeeze(3)  # [tokens, planes, kv_heads, head_dim]
        for plane, into in zip(rows.unbind(1), (cache.kept.k, cache.kept.v), strict=False):
            _plain(into).transpose(1, 2)[plan.blocks, plan.offsets] = plane


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Bytes of a type that few operations know."""
    return x.view(torch.uint8) if x.itemsize == 1 else x
