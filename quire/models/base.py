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
from quire.foundation.errors import ConfigError
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm.linear import linear
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
    def sliding_window(self) -> int | None: ...

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

    def kv_spec(self, block_size: int, dtype: torch.dtype | None = None) -> KVGroupSpec: ...

    def num_bytes(self) -> int:
        """Bytes of the weights."""
        ...


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    tokens: torch.Tensor  # int64 [n]: places in the step
    values: torch.Tensor  # [n, hidden], of the weights' dtype


class DecoderStack(nn.Module):
    """A decoder-only language model, as the worker sees it.

    layer: makes the decoder layer of a given number. tied: logits come from the embedding matrix.
    sliding_window: tokens a query sees, itself included; None: all. Submodules are named as in checkpoints.
    """

    is_causal = True

    def __init__(
        self,
        sizes: Sizes,
        layer: Callable[[int], DecoderLayer],
        *,
        tied: bool,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.hidden, self.num_heads = sizes.hidden, sizes.heads
        self.sliding_window = sliding_window
        self.embed_tokens = Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(layer(index) for index in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden, sizes.eps)
        self.lm_head = None if tied else Linear(sizes.hidden, sizes.vocab, bias=False)

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

        The final norm belongs here: only rows whose logits are wanted go through it.
        """
        norm = (self.norm.weight, self.norm.eps)
        return linear(hidden, self.output_weight, norm=norm, out_dtype=torch.float32, out=out)

    @property
    def output_weight(self) -> torch.Tensor:
        """[vocab, hidden]: what makes logits of states."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).weight

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

    def kv_spec(self, block_size: int, dtype: torch.dtype | None = None) -> KVGroupSpec:
        """dtype: of the cache; by default the weights'."""
        return KVGroupSpec(
            kind="full",
            block_size=block_size,
            num_layers=self.sizes.layers,
            num_kv_heads=self.sizes.kv_heads,
            head_dim=self.sizes.head_dim,
            dtype_bytes=(dtype or self.embed_tokens.weight.dtype).itemsize,
        )

    def num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())
