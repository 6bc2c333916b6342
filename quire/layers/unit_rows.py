"""A linear layer each of whose rows is divided by its length, as Baichuan 2 has its head."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.distributed.group import Group
from quire.distributed.topology import ALONE, Topology
from quire.foundation.errors import ConfigError
from quire.layers.linear import Linear
from quire.quantization.base import QuantizationMethod, Tensors, plain_source


class UnitRows(Linear):
    """Checkpoints have the rows as they were trained; they are divided while they are loaded, then packed."""

    def allocate(
        self,
        method: QuantizationMethod,
        modules: tuple[str, ...],
        topology: Topology = ALONE,
        group: Group | None = None,
    ) -> None:
        """See `Linear`. Raises ConfigError for a matrix that is stored in another way than plainly."""
        super().allocate(method, modules, topology, group)
        pack = self._scheme.pack
        if self._scheme.sources != (plain_source(self.dtype),):
            raise ConfigError(f"{modules[0]} is quantized, which is not supported where its rows are normed", "model")
        self._scheme = replace(self._scheme, pack=_divided if pack is None else lambda read: pack(_divided(read)))


def _divided(read: Tensors) -> Tensors:
    return {name: torch.nn.functional.normalize(rows.float()).to(rows.dtype) for name, rows in read.items()}
