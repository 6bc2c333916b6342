"""The trunk of encoders: what stands around the layers of BERT and its kin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.attention.base import PLAIN, Scores
from quire.attention.context import StepContext
from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Keeps
from quire.layers.embedding import Embedding
from quire.layers.encoder import BUCKETS, DisentangledLayer, DistanceLayer, Distances, EncoderLayer, Nearness
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
    token_types: how many there are; 0: none. width: of embeddings, if it is not that of the layers; widens: they are
    projected all the same if it is. positions: as in `DecoderStack`. scores: of layers that call attention themselves.
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
        widens: bool = False,
        scores: Scores = PLAIN,
    ) -> None:
        super().__init__(sizes, layer, tied=True, norm=norm or NoNorm(), naming=naming, positions=positions)
        width = width or sizes.hidden
        self.widening: Linear | None = None
        if widens or width != sizes.hidden:
            self.embed_tokens = Embedding(sizes.vocab, width)
            self.embed_positions = Embedding(positions[0], width) if positions else None
            self.widening = Linear(width, sizes.hidden, bias=True)
        self.token_types = Embedding(token_types, width) if token_types else None
        self.embedding_norm = embedding_norm
        if not self._keeps:
            self._keeps, self.scores = [Keeps("full", sizes.heads, sizes.head_dim)], [scores]
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


class _SharedLayers(EncoderStack):
    """shared: of each layer in turn, (group, place in it): those alike are one layer."""

    def __init__(self, shared: list[tuple[int, int]], *args: Any, **more: Any) -> None:
        self._shared = shared
        super().__init__(*args, **more)

    def checkpoint_name(self, path: str) -> str:
        first, _, rest = path.partition(".")
        if first != "layers":
            return super().checkpoint_name(path)
        index, _, rest = rest.partition(".")
        group, place = self._shared[int(index)]
        parts = ".".join(self.naming.parts.get(part, part) for part in rest.split("."))
        return f"{self.naming.prefix}encoder.albert_layer_groups.{group}.albert_layers.{place}.{parts}"


def shared_stack(config: Mapping[str, Any], max_tokens: int, *, prefix: str, names: Mapping[str, str]) -> EncoderStack:
    """ALBERT. Raises ConfigError for what cannot be."""
    sizes, act = encoder_sizes(config), read(str, config, "hidden_act")
    groups, inner = read_positive(config, "num_hidden_groups"), read_positive(config, "inner_group_num")
    positions, width = read_positive(config, "max_position_embeddings"), read_positive(config, "embedding_size")
    shared = [(int(i / (sizes.layers / groups)), place) for i in range(sizes.layers) for place in range(inner)]
    made = {
        which: EncoderLayer(sizes.hidden, sizes.heads, sizes.intermediate, sizes.eps, act)
        for which in dict.fromkeys(shared)
    }
    return _SharedLayers(
        shared,
        replace(sizes, layers=len(shared)),
        lambda index: made[shared[index]],
        max_tokens,
        naming=Naming(parts=names, prefix=prefix, is_optional=True),
        embedding_norm=LayerNorm(width, sizes.eps),
        width=width,
        widens=True,
        token_types=read_positive(config, "type_vocab_size"),
        positions=(positions, 0),
    )


def distances_stack(
    config: Mapping[str, Any], max_tokens: int, *, prefix: str, names: Mapping[str, str]
) -> EncoderStack:
    """MPNet: scores get a number for how far apart two tokens are, the same in all layers. Its first two positions are
    for padding."""
    sizes, act = encoder_sizes(config), read(str, config, "hidden_act")
    distances = Embedding(BUCKETS, sizes.heads)
    stack = EncoderStack(
        sizes,
        lambda _: DistanceLayer(sizes.hidden, sizes.heads, sizes.intermediate, sizes.eps, act, (distances,)),
        max_tokens,
        naming=Naming(parts=names, prefix=prefix, is_optional=True),
        embedding_norm=LayerNorm(sizes.hidden, sizes.eps),
        positions=(read_positive(config, "max_position_embeddings"), 2),
        scores=Scores(pairs=True),
    )
    stack.distances = distances
    return stack


def disentangled_stack(
    config: Mapping[str, Any], max_tokens: int, *, prefix: str, names: Mapping[str, str], near: Nearness
) -> EncoderStack:
    """DeBERTa. near: what is known of how far apart tokens are."""
    sizes, act = encoder_sizes(config), read(str, config, "hidden_act")
    width = read_positive(config, "embedding_size", sizes.hidden)
    if width != sizes.hidden:
        raise ConfigError(
            f"config.json: embedding_size={width} of a hidden_size={sizes.hidden} is not supported", "embedding_size"
        )
    rows = Distances(2 * near.span, sizes.hidden, sizes.eps if near.normed else None)
    positions = read_positive(config, "max_position_embeddings")
    stack = EncoderStack(
        sizes,
        lambda _: DisentangledLayer(sizes.hidden, sizes.heads, sizes.intermediate, sizes.eps, act, near, (rows,)),
        max_tokens,
        naming=Naming(parts=names, prefix=prefix, is_optional=True),
        embedding_norm=LayerNorm(sizes.hidden, sizes.eps),
        token_types=read_count(config, "type_vocab_size"),
        positions=(positions, 0) if read(bool, config, "position_biased_input") else None,
        scores=Scores(pairs=True),
    )
    stack.distances = rows
    return stack


def encoder_sizes(config: Mapping[str, Any], eps: str = "layer_norm_eps") -> Sizes:
    """eps: the key of the norms' epsilon. Raises ConfigError for what cannot be."""
    sizes = Sizes.read(config, eps)
    if "head_dim" not in config and sizes.hidden % sizes.heads:
        raise ConfigError(f"config.json: hidden_size={sizes.hidden} is no multiple of {sizes.heads} heads")
    return replace(sizes, head_dim=read_positive(config, "head_dim", sizes.hidden // sizes.heads))
