"""A model that makes vectors: any trunk, and the layers behind the pooling of its states."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.attention.recurrent import StatePart
from quire.config.pooler import PoolerConfig
from quire.config.reading import read, read_positive
from quire.config.sentence_transformers import Mode
from quire.foundation.errors import ConfigError
from quire.layers.encoder import Dense, HeadLayer, WordWeights
from quire.models.base import DecoderStack, num_bytes, num_weights
from quire.types.kv import KVGroupSpec
from quire.types.pooling import WHOLE

Classifier = Callable[[Mapping[str, Any], str, int], list[HeadLayer]]  # (config, architecture, classes)


def make_heads(
    pooler: PoolerConfig, architecture: str, config: Mapping[str, Any], family: Any, trunk: DecoderStack
) -> list[list[HeadLayer]]:
    """The layers behind the pooling, by number (`types/pooling.py`). family: its file, which may say `classifier` and
    `vocabulary_head`; without, classes are made by one layer called `score`.

    Raises ConfigError if the family has no head of the kind that is wanted.
    """
    hidden = read_positive(config, "hidden_size")
    if pooler.kind == "embed":
        usual = [
            Dense(f"{one.folder}/linear", one.in_features, one.out_features, bias=one.bias, act=one.activation)
            for one in pooler.dense
        ]
        if pooler.lexical == "vocabulary":
            return [_vocabulary_head(pooler, config, family, trunk)]
        if pooler.lexical == "tokens":
            tokens = Dense("colbert_linear", hidden, read_positive(config, "colbert_dim", hidden), bias=True)
            return [[*usual], [tokens], [Dense("sparse_linear", hidden, 1, bias=True, act="relu")]]
        if pooler.late is not None and not usual:
            return [[Dense("linear", hidden, pooler.size, bias=False)]]
        return [[*usual]]
    if pooler.label_tokens is not None or pooler.returned_tokens:
        return [[]]
    if "Reward" in architecture:
        return [_reward_head(architecture, hidden, pooler.size)]
    classifier: Classifier | None = getattr(family, "classifier", None)
    if classifier is not None:
        return [classifier(config, architecture, pooler.size)]
    # transformers' decoders have a bias where they class tokens, and none where texts.
    return [[Dense("score", hidden, pooler.size, bias=architecture.endswith("TokenClassification"))]]


def _vocabulary_head(
    pooler: PoolerConfig, config: Mapping[str, Any], family: Any, trunk: DecoderStack
) -> list[HeadLayer]:
    if not hasattr(family, "vocabulary_head"):
        raise ConfigError(f"SPLADE is not supported for models of the family {family.__name__.rpartition('.')[2]}")
    if not read(bool, config, "tie_word_embeddings", True):
        raise ConfigError("config.json: tie_word_embeddings=false is not supported for SPLADE", "tie_word_embeddings")
    layers, source = family.vocabulary_head(config)
    return [*layers, WordWeights(source, trunk.embed_tokens, squashes=pooler.squashes)]


def _reward_head(architecture: str, hidden: int, size: int) -> list[HeadLayer]:
    if architecture.startswith("InternLM2"):
        return [Dense("v_head", hidden, 1, bias=False)]
    return [Dense("score.0", hidden, hidden, bias=True, act="relu"), Dense("score.2", hidden, size, bias=True)]


class PoolingModel(nn.Module):
    """heads: what makes vectors of pooled states, and of each token's, by number (`types/pooling.py`); without one for
    tokens the first does it. unused: tensors that checkpoints of the family may hold besides, as a pattern of their
    names' beginnings.
    """

    def __init__(
        self, trunk: DecoderStack, heads: Sequence[list[HeadLayer]], pooler: PoolerConfig, unused: str | None
    ) -> None:
        super().__init__()
        self._label_tokens, self._returned = pooler.label_tokens, pooler.returned_tokens
        self._needs_logits = bool(self._label_tokens or self._returned)
        if self._needs_logits and not trunk.logits_are_products:
            raise ConfigError(
                "classifier_from_token and returned_token_ids are for models whose logits are neither scaled nor "
                "capped nor have a bias",
                "hf_overrides",
            )
        self.trunk = trunk
        self.heads = nn.ModuleList(nn.ModuleList(head) for head in heads)
        self.mode: Mode = pooler.mode or ("last" if trunk.is_causal else "cls")
        self.pools_vectors = self.mode in ("late", "splade_max", "splade_sum")
        self.reduces_by_max = self.mode in ("max", "splade_max")
        self.pooled_size = pooler.size if self.pools_vectors else trunk.hidden
        self.is_causal = trunk.is_causal
        self.layer_groups = trunk.layer_groups if trunk.is_causal else []
        self.hidden = trunk.hidden
        self.scores, self.made = trunk.scores, trunk.made
        self._sources = {layer.source for head in heads for layer in head}
        self._prefix = trunk.naming.prefix
        # A trunk may be taken from a checkpoint that goes on behind it.
        self._unused = re.compile("|".join(filter(None, [unused, r"lm_head\.|score\.|classifier\."])))

    def is_elsewhere(self, tensor: str) -> bool:
        return self.trunk.is_elsewhere(tensor)

    @property
    def num_heads(self) -> int:
        return self.trunk.num_heads

    def forward(self, input_ids: torch.Tensor, ctx: StepContext, layers: int | None = None) -> torch.Tensor:
        """See the trunk's own."""
        hidden: torch.Tensor = self.trunk(input_ids, ctx, layers)
        return hidden

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of what `forward` returned → the states that are pooled."""
        return self.trunk.states(hidden)

    def vectors(self, pooled: torch.Tensor, head: int = WHOLE) -> torch.Tensor:
        """pooled states [rows, hidden] → float32 [rows, size]."""
        x = pooled.float()
        if self._label_tokens is not None:
            yes, no = self._label_tokens
            row = self.trunk.output_row(yes)
            if no is not None:
                row = row - self.trunk.output_row(no)
            return (x @ row).unsqueeze(1)
        if self._returned:
            return x @ torch.stack([self.trunk.output_row(token) for token in self._returned]).T
        for layer in self.heads[head if head < len(self.heads) else WHOLE]:  # type: ignore[attr-defined]
            x = layer(x)
        return x.log1p_() if self.mode == "splade_sum" else x

    def finish(self, pooled: torch.Tensor) -> torch.Tensor:
        """What is made of vectors that were pooled, [rows, size], where a model does so."""
        return pooled.log1p_() if self.mode == "splade_max" else pooled

    def checkpoint_name(self, path: str) -> str:
        part, _, rest = path.partition(".")
        if part == "trunk":
            return self.trunk.checkpoint_name(rest).removeprefix(self._prefix)
        head, layer, tensor = rest.split(".")
        return f"{self.heads[int(head)][int(layer)].source}.{tensor}"  # type: ignore[index]

    @property
    def file_name(self) -> Callable[[str], str | None]:
        return self.trunk.file_name if isinstance(self.trunk, DecoderStack) else str

    def known_name(self, tensor: str) -> str | None:
        name = self.trunk.known_name(tensor)
        if name is None:
            return None
        name = name.removeprefix(self._prefix)
        wanted = name.rpartition(".")[0] in self._sources or (self._needs_logits and name == "lm_head.weight")
        return None if self._unused.match(name) and not wanted else name

    def other_names(self, module: str) -> tuple[str, ...]:
        return self.trunk.other_names(module) if isinstance(self.trunk, DecoderStack) else ()

    @property
    def twins(self) -> dict[str, str]:
        if not self._needs_logits:
            return {}
        return {name: of.removeprefix(self._prefix) for name, of in self.trunk.twins.items()}

    @property
    def layer_states(self) -> list[tuple[StatePart, ...]]:
        return self.trunk.layer_states

    def kv_groups(self, block_size: int, dtype: torch.dtype | None = None) -> list[KVGroupSpec]:
        return self.trunk.kv_groups(block_size, dtype)

    def num_bytes(self) -> int:
        return num_bytes(self)

    def num_weights(self) -> int:
        return num_weights(self)
