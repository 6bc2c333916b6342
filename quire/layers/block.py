"""The decoder layers that families share. The norms are named here, where checkpoints have them; those before a
product are computed inside of it, if they can be."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.layers.attention import SelfAttention
from quire.layers.norm import Next, Norm, RMSNorm, add_normed


class FeedForward(Protocol):
    """What stands behind attention in a layer: a module."""

    def __call__(self, residual: torch.Tensor, norm: Norm) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None) -> torch.Tensor: ...


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward, with a residual sum after each half.

    norms: those two; None: RMS norms.
    """

    mlp: FeedForward

    def __init__(
        self,
        self_attn: SelfAttention,
        mlp: FeedForward,
        hidden: int,
        eps: float,
        *,
        norms: tuple[Norm, Norm] | None = None,
    ) -> None:
        super().__init__()
        before_attention, before_mlp = norms or (RMSNorm(hidden, eps), RMSNorm(hidden, eps))
        self.input_layernorm = before_attention
        self.self_attn = self_attn
        self.post_attention_layernorm = before_mlp
        self.mlp = mlp

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [tokens, hidden]: updated in place and returned."""
        residual = self.self_attn(residual, self.input_layernorm, ctx)
        for _, rows in ctx.pieces(residual):
            self.mlp(rows, self.post_attention_layernorm)
        return residual

    def norm_in_sums(self, following: nn.Module | None) -> None:
        """Of a share of several ranks, once matrices are there: sums over ranks norm the residual stream for who reads
        it next. following: the layer behind this one."""
        _norm_for(self.self_attn, self.post_attention_layernorm, self.mlp)
        if isinstance(following, DecoderLayer):
            _norm_for(self.mlp, following.input_layernorm, following.self_attn)

    @property
    def takes_pieces(self) -> bool:
        """Whether it asks the step for rows before it reads them, whose sums may be under way."""
        return self.self_attn.takes_pieces


def _norm_for(writer: object, norm: Norm, reader: object) -> None:
    """reader: whose products read what `norm` makes of the stream that `writer` adds to, and nobody in between."""
    adding: Any = getattr(writer, "adding", None)
    assert isinstance(reader, nn.Module)
    rounds = any(getattr(part, "rounds_rows", False) for part in reader.modules())
    if adding is not None and isinstance(norm, RMSNorm) and not norm.plus_one and not rounds:
        adding.next = Next(norm)


class ScaledLayer(DecoderLayer):
    """The same, where what either half adds is multiplied by a number (Granite, MiniCPM)."""

    def __init__(self, self_attn: SelfAttention, mlp: FeedForward, hidden: int, eps: float, scale: float) -> None:
        super().__init__(self_attn, mlp, hidden, eps)
        self.scale = scale

    @property
    def takes_pieces(self) -> bool:
        return False

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        residual.add_(self.self_attn.attend(residual, self.input_layernorm, ctx), alpha=self.scale)
        return residual.add_(self.mlp.add(residual, self.post_attention_layernorm, None), alpha=self.scale)


class OuterNormLayer(nn.Module):
    """What either half adds is normed itself. before: norms that its input goes through besides; None: none.
    scale: that it is multiplied by.

    Without norms before, OLMo 2's; with, Gemma 2's.
    """

    mlp: FeedForward

    def __init__(
        self,
        self_attn: SelfAttention,
        mlp: FeedForward,
        after: tuple[Norm, Norm],
        before: tuple[Norm, Norm] | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.input_layernorm: Norm | None = before[0] if before else None
        self.pre_feedforward_layernorm: Norm | None = before[1] if before else None
        self.self_attn = self_attn
        self.mlp = mlp
        self.post_attention_layernorm, self.post_feedforward_layernorm = after

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [tokens, hidden]: updated in place and returned."""
        added = self.self_attn.attend(residual, self.input_layernorm, ctx)
        residual = add_normed(residual, added, self.post_attention_layernorm, self.scale)
        return add_normed(residual, self.feed(residual, ctx), self.post_feedforward_layernorm, self.scale)

    def feed(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # noqa: ARG002
        """What the second half adds, before its norm."""
        return self.mlp.add(residual, self.pre_feedforward_layernorm, None)


class ParallelLayer(nn.Module):
    """Attention and feed-forward both see what comes in, through one norm or one each, and are added to it."""

    mlp: FeedForward

    def __init__(self, self_attn: SelfAttention, mlp: FeedForward, norm: Norm, mlp_norm: Norm | None = None) -> None:
        super().__init__()
        self.input_layernorm = norm
        self.post_attention_layernorm = mlp_norm
        self.self_attn = self_attn
        self.mlp = mlp

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [tokens, hidden]: updated in place and returned."""
        x = self.input_layernorm(residual)
        inner = x if self.post_attention_layernorm is None else self.post_attention_layernorm(residual)
        residual = self.self_attn.add(x, None, residual, ctx)
        return self.mlp.add(inner, None, residual)


class PostNormLayer(nn.Module):
    """The sum after each half is normed, as in the first Transformers."""

    mlp: FeedForward

    def __init__(self, self_attn: SelfAttention, mlp: FeedForward, norms: tuple[Norm, Norm]) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.input_layernorm, self.post_attention_layernorm = norms
        self.mlp = mlp

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [tokens, hidden]: overwritten."""
        x = self.input_layernorm(self.self_attn.add(residual, None, residual, ctx))
        return self.post_attention_layernorm(self.mlp.add(x, None, x))  # type: ignore[no-any-return]
