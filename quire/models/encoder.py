"""The trunk of encoders: what stands around the layers of BERT and its kin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.attention.base import PLAIN
from quire.attention.context import StepContext
from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Keeps
from quire.layers.embedding import Embedding
from quire.layers.encoder import EncoderLayer
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm, NoNorm, Norm
from quire.models.base import DecoderStack, GivenEmbeddings, Naming, Sizes

_OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of norms, in checkpoints that came from TensorFlow
EMBEDDINGS = {
    "embed_tokens": "embeddings.word_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "widening": "embeddings_project",
}
# What checkpoints of BERT call our modules.
BERT_NAMES = {
    **EMBEDDINGS,
    "layers": "encoder.layer",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}


class EncoderStack(DecoderStack):
    """Embeddings of words, and perhaps of positions and of the two texts of a pair, normed; layers; nothing is cached.

    max_tokens: of a prompt. norm: behind the last layer; None: there is none. embedding_norm: None: there is none.
    token_types: how many there are; 0: none. width: of embeddings, if it is not that of the layers. positions: as in
    `DecoderStack`.
    """

    def __init__(
        self,
        sizes: Sizes,
        layer: Callable[[int], nn.Module],
        max_tokens: int,
        *,
        naming: Naming,
        embedding_norm: LayerNorm | None,
        token_types: int = 0,
        width: int | None = None,
        norm: Norm | None = None,
        positions: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(sizes, layer, tied=True, norm=norm or NoNorm(), naming=naming, positions=positions)
        width = width or sizes.hidden
        self.widening: Linear | None = None
        if width != sizes.hidden:
            self.embed_tokens = Embedding(sizes.vocab, width)
            self.embed_positions = Embedding(positions[0], width) if positions else None
            self.widening = Linear(width, sizes.hidden, bias=True)
        self.token_types = Embedding(token_types, width) if token_types else None
        self.embedding_norm = embedding_norm
        if not self._keeps:
            self._keeps, self.scores = [Keeps("full", sizes.heads, sizes.head_dim)], [PLAIN]
        self.look_both_ways(max_tokens)

    def _embedded(self, input_ids: torch.Tensor, ctx: StepContext, given: GivenEmbeddings | None) -> torch.Tensor:
        x = super()._embedded(input_ids, ctx, given)
        if self.token_types is not None:
            types = self.token_types.weight
            x += types[0] if ctx.token_types is None else self.token_types(ctx.token_types)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return x if self.widening is None else self.widening(x)

    def known_name(self, tensor: str) -> str | None:
        stem, _, last = tensor.rpartition(".")
        if last in ("position_ids", "inv_freq"):
            return None
        return super().known_name(f"{stem}.{_OLD_NAMES.get(last, last)}" if stem else tensor)


def bert_stack(
    config: Mapping[str, Any],
    max_tokens: int,
    *,
    prefix: str,
    first_position: int = 0,
    names: Mapping[str, str] = BERT_NAMES,
) -> EncoderStack:
    """BERT. prefix: may stand before the names of tensors in checkpoints. first_position: of the first token, in the
    table of positions.

    Raises ConfigError for a config that cannot be, or that has fewer positions.
    """
    sizes, act = encoder_sizes(config), read(str, config, "hidden_act")
    positions = read_positive(config, "max_position_embeddings")
    if first_position + max_tokens > positions:
        raise ConfigError(
            f"max_model_len must be <= {positions - first_position} for this model, got {max_tokens}", "max_model_len"
        )
    width = read_positive(config, "embedding_size", sizes.hidden)
    return EncoderStack(
        sizes,
        lambda _: EncoderLayer(sizes.hidden, sizes.heads, sizes.intermediate, sizes.eps, act),
        max_tokens,
        naming=Naming(parts=names, prefix=prefix, is_optional=True),
        embedding_norm=LayerNorm(width, sizes.eps),
        width=width,
        token_types=read_positive(config, "type_vocab_size") if config.get("type_vocab_size") else 0,
        positions=(positions, first_position),
    )


def encoder_sizes(config: Mapping[str, Any], eps: str = "layer_norm_eps") -> Sizes:
    """eps: the key of the norms' epsilon. Raises ConfigError for what cannot be."""
    sizes = Sizes.read(config, eps)
    if "head_dim" not in config and sizes.hidden % sizes.heads:
        raise ConfigError(f"config.json: hidden_size={sizes.hidden} is no multiple of {sizes.heads} heads")
    return replace(sizes, head_dim=read_positive(config, "head_dim", sizes.hidden // sizes.heads))
