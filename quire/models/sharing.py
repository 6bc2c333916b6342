"""The trunk of models whose layers see the embeddings again, and some of which share a block (Zamba 2)."""

from __future__ import annotations

import torch

from quire.attention.context import StepContext
from quire.models.base import DecoderStack, GivenEmbeddings


class SharingStack(DecoderStack):
    has_one_stream = False

    def forward(
        self,
        input_ids: torch.Tensor,
        ctx: StepContext,
        layers: int | None = None,
        given: GivenEmbeddings | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert residual is None  # they are one stage
        embedded = self._embedded(input_ids, ctx, given)
        residual = embedded.clone()
        for layer in self.layers if layers is None else self._samples:
            residual = layer(residual, embedded, ctx)
        return residual

    def known_name(self, tensor: str) -> str | None:
        """A shared block's tensors are those of the first layer that has it; files may have them again."""
        known = super().known_name(tensor)
        if known is not None and ".shared_transformer." in known:
            layer = self.layers[int(known.split(".")[2])] if known.split(".")[2].isdigit() else None
            return known if layer is None or hasattr(layer, "shared_transformer") else None
        return known
