"""The KV cache itself: one tensor for all layers, and the ids of the tokens whose KV it holds."""

from __future__ import annotations

import torch

from quire.attention.context import LayerCache
from quire.types.kv import KVGroupSpec


class KVStore:
    """Paged keys and values, [layers, 2, blocks, kv_heads, block_size, head_dim].

    `token_of_slot` [blocks * block_size] int32 is the device's own history of every request, addressed through
    the block tables: penalties and bad words read it, and it is shared and evicted together with the KV.
    """

    def __init__(self, spec: KVGroupSpec, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.num_layers, 2, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        # Zeros, not garbage: the null block is read by padding rows, and NaN there would spread through a mask.
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [LayerCache(k=layer[0], v=layer[1]) for layer in self.data]
        self.token_of_slot = torch.zeros(num_blocks * spec.block_size, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
