"""The KV cache itself: the pages of all layers, and the ids of the tokens whose KV they hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from quire.attention.context import LayerCache
from quire.worker.pages import Pages


class KVStore:
    """Paged keys and values, bytes [slabs, pages, bytes of a slice]; `layers` are views of it.

    With one group of layers that is [layers, planes, pages, kv_heads, block_size, head_dim]. `token_of_slot`
    [pages * block size of the keeper] int32 is the device's own history of every request, addressed through the
    keeper's block table: penalties and bad words read it, and it is shared and evicted together with the KV.

    layer_groups: the group of each layer.
    """

    def __init__(
        self, pages: Pages, layer_groups: Sequence[int], num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Zeros, not garbage: the null block is read by padding rows, and NaN there would spread through a mask.
        self.data = torch.zeros(pages.slabs, num_blocks, pages.slab_bytes, dtype=torch.uint8, device=device)
        places = [count() for _ in pages.groups]
        self.layers = [self._layer(pages, group, next(places[group]), dtype) for group in layer_groups]
        keeper = pages.groups[pages.keeper]
        if keeper.kind == "history":
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

    @property
    def num_bytes(self) -> int:
        return self.data.numel()
