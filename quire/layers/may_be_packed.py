"""Layers whose matrix is plain in every model, and that files may have quantized nevertheless: it is unpacked while it
is read. Routers of checkpoints that bitsandbytes made are such."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.linear import Linear
from quire.layers.low_rank import RareLowRank
from quire.layers.targets import Target
from quire.quantization.base import QuantizationMethod


class MayBePacked(nn.Module):
    """weight [outputs, inputs], whole on every rank."""

    weight: nn.Parameter
    low_rank: RareLowRank | None = None  # what adapters add, if there may be any
    _pattern: tuple[Linear, ...] = ()  # what it is made of; in a tuple, so that it is no layer

    def unpack_from(self, method: QuantizationMethod, name: str) -> None:
        """Files have it as this method says, as a module of that name. Raises ConfigError."""
        rows, columns = self.weight.shape
        pattern, before = Linear(columns, rows, bias=False, is_plain=True), torch.get_default_dtype()
        torch.set_default_dtype(self.weight.dtype)
        try:
            with torch.device("meta"):
                pattern.allocate(method, (name,))
        finally:
            torch.set_default_dtype(before)
        self._pattern = (pattern,)

    @property
    def is_packed(self) -> bool:
        return bool(self._pattern)

    def packed_targets(self) -> Iterator[Target]:
        """Of the tensors that its weight is made of."""
        (pattern,) = self._pattern
        return pattern.targets_into(pattern.modules_in_checkpoint, {"weight": self.weight.data})
