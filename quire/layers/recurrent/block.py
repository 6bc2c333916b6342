"""Decoder layers of models some or all of whose layers keep a state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.layers.attention import Attention, SelfAttention
from quire.layers.block import FeedForward
from quire.layers.experts import MixtureOfExperts
from quire.layers.norm import Norm, RMSNorm
from quire.layers.recurrent.base import Recurrent

Mixer = SelfAttention | Recurrent


class MixerLayer(nn.Module):
    """Norm and one thing behind it: what attends, keeps a state, or a feed-forward layer (Mamba, Nemotron-H)."""

    def __init__(self, mixer: Mixer | FeedForward, hidden: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, eps)
        self.mixer = mixer

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [tokens, hidden]: updated in place and returned."""
        mixer = self.mixer
        if isinstance(mixer, SelfAttention | Recurrent):
            y: torch.Tensor = mixer(residual, self.norm, ctx)
            return y
        if isinstance(mixer, MixtureOfExperts):
            return mixer.add(residual, self.norm, residual, ctx.live)
        return mixer(residual, self.norm)


class HybridLayer(nn.Module):
    """Norm, mixer, norm, feed-forward, as checkpoints name them.

    mixer: (its name, itself), as the others. scale: that what a half adds is multiplied by.
    """

    def __init__(
        self,
        mixer: tuple[str, Mixer],
        mlp: tuple[str, FeedForward],
        norms: tuple[tuple[str, Norm], tuple[str, Norm]],
        *,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        for name, module in (mixer, mlp, *norms):
            assert isinstance(module, nn.Module)
            self.add_module(name, module)
        self._mixer, self._mlp, self._norms = mixer[0], mlp[0], (norms[0][0], norms[1][0])
        self.scale = scale

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [tokens, hidden]: updated in place and returned."""
        mixer, mlp = getattr(self, self._mixer), getattr(self, self._mlp)
        before, between = (getattr(self, name) for name in self._norms)
        live = (ctx.live,) if isinstance(mlp, MixtureOfExperts) else ()
        if self.scale == 1.0:
            residual = mixer(residual, before, ctx)
            y: torch.Tensor = mlp.add(residual, between, residual, *live)
            return y
        residual.add_(mixer.attend(residual, before, ctx), alpha=self.scale)
        return residual.add_(mlp.add(residual, between, None, *live), alpha=self.scale)


class Scales(NamedTuple):
    """That what goes into a part and comes out of it is multiplied by."""

    attention_in: float
    attention_out: float
    state_in: float
    state_out: float
    mlp_out: float


class BothLayer(nn.Module):
    """What attends and what keeps a state, side by side behind one norm; then norm and feed-forward (Falcon-H1)."""

    def __init__(
        self,
        self_attn: Attention,
        mamba: Recurrent,
        feed_forward: FeedForward,
        hidden: int,
        eps: float,
        scales: Scales,
    ) -> None:
        super().__init__()
        self.input_layernorm, self.pre_ff_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attn, self.mamba, self.feed_forward = self_attn, mamba, feed_forward
        self.scales = scales

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [tokens, hidden]: updated in place and returned."""
        scales = self.scales
        x = self.input_layernorm(residual)
        residual.add_(self.mamba.attend(_scaled(x, scales.state_in), None, ctx), alpha=scales.state_out)
        attended = self.self_attn.attend(_scaled(x, scales.attention_in), None, ctx)
        residual.add_(attended, alpha=scales.attention_out)
        return residual.add_(self.feed_forward.add(residual, self.pre_ff_layernorm, None), alpha=scales.mlp_out)


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else x * scale


class NormedSumLayer(nn.Module):
    """What a half adds goes to what it has seen, which is normed: x = norm(x); x = alpha x + beta half(x) (MiniMax).

    scales, mlp_scales: alpha and beta of either half.
    """

    def __init__(
        self,
        self_attn: Mixer,
        mlp: MixtureOfExperts,
        norms: tuple[Norm, Norm],
        scales: tuple[float, float],
        mlp_scales: tuple[float, float],
    ) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn, self.mlp = self_attn, mlp
        self.scales, self.mlp_scales = scales, mlp_scales

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [tokens, hidden] → the same of the next layer, in other memory."""
        x: torch.Tensor = self.input_layernorm(residual)
        added = self.self_attn.attend(x, None, ctx)
        x = x.mul_(self.scales[0]).add_(added, alpha=self.scales[1])
        x = self.post_attention_layernorm(x)
        added = self.mlp.add(x, None, None, ctx.live)
        return x.mul_(self.mlp_scales[0]).add_(added, alpha=self.mlp_scales[1])
