"""The trunk of BERT and its kin: three embeddings summed, layers, no cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from quire.attention.context import EncoderContext
from quire.attention.recurrent import StatePart
from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.embedding import Embedding
from quire.layers.encoder import EncoderLayer
from quire.layers.norm import LayerNorm
from quire.models.base import num_bytes, num_weights
from quire.types.kv import KVGroupSpec

# Paths of our modules, and what they are called in checkpoints.
_NAMES = {
    "word_embeddings": "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "token_type_embeddings": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of norms, in checkpoints that came from TensorFlow


class EncoderStack(nn.Module):
    """max_tokens: of a prompt. first_position: of its first token, in the table of positions. prefix: may stand before
    the names of tensors in checkpoints.

    Raises ConfigError for a config that cannot be, or that has fewer positions.
    """

    is_causal = False

    def __init__(self, config: Mapping[str, Any], max_tokens: int, *, prefix: str, first_position: int = 0) -> None:
        super().__init__()
        hidden, heads = read_positive(config, "hidden_size"), read_positive(config, "num_attention_heads")
        if hidden % heads:
            raise ConfigError(f"config.json: hidden_size={hidden} is no multiple of {heads} heads")
        eps, act = read(float, config, "layer_norm_eps"), read(str, config, "hidden_act")
        self.hidden, self.num_heads, self.prefix = hidden, heads, prefix
        self.first_position = first_position
        positions = read_positive(config, "max_position_embeddings")
        if first_position + max_tokens > positions:
            raise ConfigError(
                f"max_model_len must be <= {positions - first_position} for this model, got {max_tokens}",
                "max_model_len",
            )
        self.max_tokens = max_tokens
        self.word_embeddings = Embedding(read_positive(config, "vocab_size"), hidden)
        self.position_embeddings = Embedding(positions, hidden)
        self.token_type_embeddings = Embedding(read_positive(config, "type_vocab_size"), hidden)
        self.embedding_norm = LayerNorm(hidden, eps)
        self.layers = nn.ModuleList(
            EncoderLayer(hidden, heads, read_positive(config, "intermediate_size"), eps, act)
            for _ in range(read_positive(config, "num_hidden_layers"))
        )

    def forward(self, input_ids: torch.Tensor, ctx: EncoderContext, layers: int | None = None) -> torch.Tensor:
        """input_ids int32 [tokens] → the states of the last layer, [tokens, hidden]. layers: only so many."""
        types = self.token_type_embeddings
        x: torch.Tensor = self.word_embeddings(input_ids) + self.position_embeddings(
            ctx.positions + self.first_position
        )
        x += types.weight[0] if ctx.token_types is None else types(ctx.token_types)
        x = self.embedding_norm(x)
        for layer in islice(self.layers, layers):
            x = layer(x, ctx)
        return x

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def checkpoint_name(self, path: str) -> str:
        layer = re.match(r"layers\.(\d+)\.", path)
        module, _, tensor = path[layer.end() if layer else 0 :].rpartition(".")
        return (f"encoder.layer.{layer[1]}." if layer else "") + f"{_NAMES[module]}.{tensor}"

    def known_name(self, tensor: str) -> str | None:
        name = tensor.removeprefix(self.prefix)
        if name == "embeddings.position_ids":
            return None
        stem, _, last = name.rpartition(".")
        return f"{stem}.{_OLD_NAMES.get(last, last)}"

    @property
    def twins(self) -> dict[str, str]:
        return {}

    @property
    def layer_groups(self) -> list[int]:
        return []

    @property
    def layer_states(self) -> list[tuple[StatePart, ...]]:
        return []

    def kv_groups(self, block_size: int, dtype: torch.dtype | None = None) -> list[KVGroupSpec]:  # noqa: ARG002
        spec = KVGroupSpec(
            kind="none",
            block_size=1 << (self.max_tokens - 1).bit_length(),
            num_layers=0,
            num_kv_heads=self.num_heads,
            head_dim=self.hidden // self.num_heads,
            dtype_bytes=self.word_embeddings.weight.element_size(),
        )
        return [spec]

    def num_bytes(self) -> int:
        return num_bytes(self)

    def num_weights(self) -> int:
        return num_weights(self)
