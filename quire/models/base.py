"""The trunk that every decoder-only model shares: embed, layers, final norm, logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.config.reading import read, read_positive
from quire.distributed.group import Group
from quire.foundation.errors import ConfigError
from quire.kernels.across_ranks import gather_columns
from quire.kernels.elementwise.norm import rms_norm
from quire.layers.attention import Attention, Keeps
from quire.layers.block import DecoderLayer
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.types.kv import KVGroupSpec


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that every family's config.json spells the same way."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Sizes:
        """Raises ConfigError for what cannot be."""
        hidden, heads = read_positive(config, "hidden_size"), read_positive(config, "num_attention_heads")
        kv_heads = read_positive(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        return cls(
            vocab=read_positive(config, "vocab_size"),
            hidden=hidden,
            intermediate=read_positive(config, "intermediate_size"),
            layers=read_positive(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=read_positive(config, "head_dim", hidden // heads),
            eps=read(float, config, "rms_norm_eps"),
        )


class Model(Protocol):
    """What loading and sizing ask of any model."""

    @property
    def num_heads(self) -> int: ...

    @property
    def layer_groups(self) -> list[int]:
        """The number of each layer's group; empty for a model that keeps nothing."""
        ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def checkpoint_name(self, path: str) -> str:
        """What checkpoints call the tensor at `path` in the module tree."""
        ...

    def known_name(self, tensor: str) -> str | None:
        """`checkpoint_name` of a checkpoint's tensor, which may spell it otherwise; None if the model has no use for
        it."""
        ...

    @property
    def twins(self) -> dict[str, str]:
        """Tensors of checkpoints that must equal another of the model's, if they are there at all, and which."""
        ...

    def kv_groups(self, block_size: int, dtype: torch.dtype | None = None) -> list[KVGroupSpec]:
        """Layers that keep the same kind of thing, the ones that keep all of it first. dtype: of the cache; by default
        the weights'."""
        ...

    def num_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    def num_weights(self) -> int:
        """Numbers that these stand for."""
        ...


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    tokens: torch.Tensor  # int64 [n]: places in the step
    values: torch.Tensor  # [n, hidden], of the weights' dtype


class DecoderStack(nn.Module):
    """A decoder-only language model, as the worker sees it.

    layer: makes the decoder layer of a given number. tied: logits come from the embedding matrix.
    Submodules are named as in checkpoints.
    """

    is_causal = True

    def __init__(
        self,
        sizes: Sizes,
        layer: Callable[[int], DecoderLayer],
        *,
        tied: bool,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.hidden, self.num_heads = sizes.hidden, sizes.heads
        self.group: Group | None = None
        self.embed_tokens = Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(layer(index) for index in range(sizes.layers))
        self._keeps, self.layer_groups = _grouped(self.layers)
        self.norm = RMSNorm(sizes.hidden, sizes.eps)
        self.lm_head = None if tied else Linear(sizes.hidden, sizes.vocab, bias=False, role="vocabulary")

    def join(self, group: Group) -> None:
        """Be the share of one of several ranks. Raises ConfigError if they cannot share it."""
        topology = group.topology
        self.num_heads = topology.share(self.num_heads, "num_attention_heads")
        self._keeps = [
            keeps._replace(num_kv_heads=topology.heads(keeps.num_kv_heads, "num_key_value_heads"))
            for keeps in self._keeps
        ]
        self.group = group

    def forward(
        self,
        input_ids: torch.Tensor,
        ctx: StepContext,
        layers: int | None = None,
        given: GivenEmbeddings | None = None,
    ) -> torch.Tensor:
        """input_ids int32 [tokens] → the residual stream after the last layer, [tokens, hidden].

        layers: only so many, to warm up. given: what some tokens are instead of their ids' embeddings.
        """
        residual: torch.Tensor = self.embed_tokens(input_ids)
        if given is not None:
            residual.index_copy_(0, given.tokens, given.values)
        for layer in islice(self.layers, layers):
            residual = layer(residual, ctx)
        return residual

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: rows of what `forward` returned, [rows, hidden] → float32 [rows, vocab], written to `out` if given.

        The final norm belongs here: only rows whose logits are wanted go through it. Of ranks the first has them.
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        if self.group is None:
            return head.wide(hidden, self.norm, out)
        part = head.wide(hidden, self.norm)
        if out is None:
            out = torch.empty((len(hidden), self.sizes.vocab), dtype=torch.float32, device=hidden.device)
        return gather_columns(part, out, self.group)

    def output_row(self, token: int) -> torch.Tensor:
        """What makes the logit of a token of a state: float32 [hidden]."""
        if self.lm_head is None:
            return self.embed_tokens.dense(torch.float32, slice(token, token + 1))[0]
        (share,) = self.lm_head.shares
        place = token - share.begin
        if self.group is None:
            return self.lm_head.matrix.dense(torch.float32, slice(place, place + 1))[0]
        row = torch.zeros(self.hidden, dtype=torch.float32, device=self.norm.weight.device)
        if share.begin <= token < share.end:
            row.copy_(self.lm_head.matrix.dense(torch.float32, slice(place, place + 1))[0])
        return self.group.sum(row)

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: rows of what `forward` returned → the model's own last hidden states, which logits are made of."""
        return rms_norm(hidden, self.norm.weight, self.norm.eps)

    def known_name(self, tensor: str) -> str | None:
        return tensor

    @property
    def twins(self) -> dict[str, str]:
        return {"lm_head.weight": self.checkpoint_name("embed_tokens.weight")} if self.lm_head is None else {}

    def checkpoint_name(self, path: str) -> str:
        return path if path.startswith("lm_head.") else f"model.{path}"

    def kv_groups(self, block_size: int, dtype: torch.dtype | None = None) -> list[KVGroupSpec]:
        return [
            KVGroupSpec(
                kind=keeps.kind,
                block_size=block_size,
                num_layers=self.layer_groups.count(number),
                num_kv_heads=keeps.num_kv_heads,
                head_dim=keeps.head_dim,
                dtype_bytes=(dtype or self.embed_tokens.weight.dtype).itemsize,
                window=keeps.window,
            )
            for number, keeps in enumerate(self._keeps)
        ]

    def num_bytes(self) -> int:
        return num_bytes(self)

    def num_weights(self) -> int:
        return num_weights(self)


def num_bytes(module: nn.Module) -> int:
    """Of its parameters."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def num_weights(module: nn.Module) -> int:
    """Numbers that its parameters stand for, however they are kept."""
    return sum(
        child.num_weights() if isinstance(child, Linear) else sum(p.numel() for p in child.parameters(recurse=False))
        for child in module.modules()
    )


def _grouped(layers: nn.ModuleList) -> tuple[list[Keeps], list[int]]:
    """What each group keeps, and the number of each layer's group, which the layers are told."""
    attentions = sorted((m for m in layers.modules() if isinstance(m, Attention)), key=lambda m: m.index)
    keeps = sorted({attention.keeps for attention in attentions})  # "full" stands before "window"
    for attention in attentions:
        attention.group = keeps.index(attention.keeps)
    return keeps, [attention.group for attention in attentions]
