"""The trunk of models with several residual streams and vectors of each token's own for every layer (Gemma 3n)."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.layers.altup import Streams, of_size
from quire.layers.borrowed_attention import BorrowedAttention
from quire.layers.embedding import SpreadEmbedding, rounded
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.base import DecoderStack, GivenEmbeddings, Sizes

_BORROWED = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")


class StreamsStack(DecoderStack):
    """words: of whose tokens there are own vectors; others have that of token 0."""

    has_one_stream = False

    def __init__(self, sizes: Sizes, layer: Any, streams: Streams, words: int, **more: Any) -> None:
        super().__init__(sizes, layer, **more)
        self._numbers = {layer: number for number, layer in enumerate(self.layers)}
        hidden, own = sizes.hidden, sizes.layers * streams.own
        self.streams, self._words = streams, words
        self.embed_tokens_per_layer = SpreadEmbedding(words, own, scale=rounded(streams.own**0.5))
        self.per_layer_model_projection = Linear(hidden, own, bias=False)
        self.per_layer_projection_norm = RMSNorm(streams.own, sizes.eps)
        self.altup_projections, self.altup_unembed_projections = (
            nn.ModuleList(Linear(hidden, hidden, bias=False) for _ in range(streams.count - 1)) for _ in range(2)
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        ctx: StepContext,
        layers: int | None = None,
        given: GivenEmbeddings | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert residual is None  # they are one stage
        first = self._embedded(input_ids, ctx, given)
        own = self._own(input_ids, first)
        streams = torch.stack([first, *(of_size(each(first), first) for each in self.altup_projections)], dim=1)
        for layer in self.layers if layers is None else self._samples:
            streams = layer(streams, own[:, self._numbers[layer]], ctx)
        first = streams[:, 0].contiguous()
        back = zip(self.altup_unembed_projections, streams.unbind(1)[1:], strict=True)
        return torch.stack([first, *(of_size(each(x.contiguous()), first) for each, x in back)]).mean(dim=0)

    def _own(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[tokens, layers, columns]: a token's own vectors, and what its embedding says of them."""
        shape = (len(embedded), self.sizes.layers, self.streams.own)
        told = self.per_layer_model_projection(embedded).mul_(rounded(self.sizes.hidden**-0.5)).view(shape)
        kept = self.embed_tokens_per_layer(torch.where(input_ids < self._words, input_ids, 0)).view(shape)
        own: torch.Tensor = (self.per_layer_projection_norm(told) + kept).mul_(rounded(0.5**0.5))
        return own

    def known_name(self, tensor: str) -> str | None:
        """Files have keys and values of layers that borrow too, which nobody looks at."""
        known = super().known_name(tensor)
        layer = None if known is None else _BORROWED.match(known)
        if layer and int(layer[1]) < len(self.layers):
            return None if isinstance(self.layers[int(layer[1])].self_attn, BorrowedAttention) else known
        return known
