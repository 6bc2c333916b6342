"""A model that makes vectors: any trunk, and the layers behind the pooling of its states."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quire.attention.base import PLAIN
from quire.attention.recurrent import StatePart
from quire.config.pooler import Mode, PoolerConfig
from quire.config.reading import read_positive
from quire.foundation.errors import ConfigError
from quire.layers.encoder import Dense
from quire.models.base import DecoderStack, num_bytes, num_weights
from quire.models.encoder import EncoderStack
from quire.types.kv import KVGroupSpec

Classifier = Callable[[Mapping[str, Any], str, int], list[Dense]]  # (config, architecture, classes)


def make_head(
    pooler: PoolerConfig, architecture: str, config: Mapping[str, Any], classifier: Classifier | None
) -> list[Dense]:
    """The layers behind the pooling. classifier: the family's own; None: one layer called `score`."""
    if pooler.kind == "embed":
        return [
            Dense(
                f"{layer.folder}/linear", layer.in_features, layer.out_features, bias=layer.bias, act=layer.activation
            )
            for layer in pooler.dense
        ]
    if pooler.label_tokens is not None:
        return []
    if classifier is not None:
        return classifier(config, architecture, pooler.size)
    return [Dense("score", read_positive(config, "hidden_size"), pooler.size, bias=False)]


class PoolingModel(nn.Module):
    """unused: tensors that checkpoints of the family may hold besides, as a pattern of their names' beginnings."""

    def __init__(
        self, trunk: DecoderStack | EncoderStack, head: list[Dense], pooler: PoolerConfig, unused: str | None
    ) -> None:
        super().__init__()
        if pooler.label_tokens is not None and isinstance(trunk, DecoderStack) and not trunk.logits_are_products:
            raise ConfigError(
                "classifier_from_token is for models whose logits are neither scaled nor capped nor have a bias",
                "hf_overrides",
            )
        self.trunk = trunk
        self.head = nn.ModuleList(head)
        self.mode: Mode = pooler.mode or ("last" if trunk.is_causal else "cls")
        self.is_causal = trunk.is_causal
        self.layer_groups = trunk.layer_groups
        self.hidden = trunk.hidden
        self.scores = trunk.scores if isinstance(trunk, DecoderStack) else [PLAIN]
        self._label_tokens = pooler.label_tokens
        self._sources = {layer.source for layer in head}
        self._prefix = trunk.naming.prefix if isinstance(trunk, DecoderStack) else "model."
        # A trunk may be taken from a checkpoint that goes on behind it.
        self._unused = re.compile("|".join(filter(None, [unused, r"lm_head\.|score\.|classifier\."])))

    @property
    def num_heads(self) -> int:
        return self.trunk.num_heads

    def forward(self, input_ids: torch.Tensor, ctx: Any, layers: int | None = None) -> torch.Tensor:
        """ctx: a StepContext if the model is causal, else an EncoderContext. See the trunks' own."""
        hidden: torch.Tensor = self.trunk(input_ids, ctx, layers)
        return hidden

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of what `forward` returned → the states that are pooled."""
        return self.trunk.states(hidden)

    def vectors(self, pooled: torch.Tensor) -> torch.Tensor:
        """pooled states [rows, hidden] → float32 [rows, size]."""
        x = pooled.float()
        if self._label_tokens is not None and isinstance(self.trunk, DecoderStack):
            yes, no = self._label_tokens
            row = self.trunk.output_row(yes)
            if no is not None:
                row = row - self.trunk.output_row(no)
            return (x @ row).unsqueeze(1)
        for layer in self.head:
            x = layer(x)
        return x

    def checkpoint_name(self, path: str) -> str:
        part, _, rest = path.partition(".")
        if part == "trunk":
            return self.trunk.checkpoint_name(rest).removeprefix(self._prefix)
        index, _, tensor = rest.partition(".")
        return f"{self.head[int(index)].source}.{tensor}"

    def known_name(self, tensor: str) -> str | None:
        name = self.trunk.known_name(tensor)
        if name is None:
            return None
        name = name.removeprefix(self._prefix)
        wanted = name.rpartition(".")[0] in self._sources or (self._label_tokens and name == "lm_head.weight")
        return None if self._unused.match(name) and not wanted else name

    @property
    def twins(self) -> dict[str, str]:
        if self._label_tokens is None:
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
