"""The KV cache itself: the pages of all layers, and the ids of the tokens whose KV they hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

import torch

from quire.attention.context import LayerCache, StateCache
from quire.attention.recurrent import StatePart
from quire.worker.pages import Pages
from quire.worker.state_pages import StatePages


class KVStore:
    """Paged keys and values, bytes [slabs, pages, bytes of a slice]; `layers` are views of it.

    With one group of layers that is [layers, planes, pages, kv_heads, block_size, head_dim]. `token_of_slot`
    [pages * block size of the keeper] int32 is the device's own history of every request, addressed through the
    keeper's block table: penalties and bad words read it, and it is shared and evicted together with the KV.

    layer_groups: the group of each layer. states: what each of those that keep a state does, in their order.
    """

    def __init__(
        self,
        pages: Pages,
        layer_groups: Sequence[int],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        states: Sequence[Sequence[StatePart]] = (),
    ) -> None:
        # Zeros, not garbage: the null block is read by padding rows, and NaN there would spread through a mask.
        self.data = torch.zeros(pages.slabs, num_blocks, pages.slab_bytes, dtype=torch.uint8, device=device)
        places = [count() for _ in pages.groups]
        self.layers = [
            self._state(pages, place, states[place])
            if pages.groups[group].kind == "state"
            else self._layer(pages, group, place, dtype)
            for group, place in ((group, next(places[group])) for group in layer_groups)
        ]
        self.states = StatePages(pages, self.data) if pages.states_a_page else None  # None: no layer keeps one
        keeper = pages.groups[pages.keeper]
        if keeper.kind == "history" and keeper.block_size * 4 == pages.slab_bytes:
            self.token_of_slot = self.data[0].view(torch.int32).view(-1)
        else:
            self.token_of_slot = torch.zeros(num_blocks * keeper.block_size, dtype=torch.int32, device=device)

    def _layer(self, pages: Pages, group: int, place: int, dtype: torch.dtype) -> LayerCache:
        """place: of the layer in its group."""
        spec, planes_a_slab = pages.groups[group], pages.planes_a_slab(group)
        shape = (-1, planes_a_slab, spec.num_kv_heads, pages.kernel_block(group), spec.head_dim)

        def plane(number: int) -> torch.Tensor:
            slab = self.data[number // planes_a_slab].view(dtype)
            return slab.view(shape)[:, number % planes_a_slab]

        k = plane(spec.planes * place)
        return LayerCache(k=k, v=k[..., : spec.value_dim] if spec.value_dim else plane(spec.planes * place + 1))

    def _state(self, pages: Pages, place: int, parts: Sequence[StatePart]) -> StateCache:
        """place: of the layer among those that keep a state."""
        entry, number = divmod(place, pages.states_a_page)
        begin = number * next(group.state_bytes for group in pages.groups if group.kind == "state")
        views = []
        for part in parts:
            line = self.data[0].view(part.dtype)  # [pages, numbers of a page]
            first = begin // part.dtype.itemsize
            views.append(line[:, first : first + math.prod(part.shape)].unflatten(1, part.shape))
            begin += part.num_bytes
        return StateCache(entry, tuple(views))

    @property
    def num_bytes(self) -> int:
        return self.data.numel()
