"""Layers that keep a state of each request instead of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quire.attention.context import StateCache, StepContext
from quire.attention.recurrent import StatePart
from quire.kernels.recurrent.rows import Rows
from quire.layers.attention import Keeps
from quire.layers.norm import Norm

STATE = Keeps("state", 1, 1, 0)


class Recurrent(nn.Module):
    """A layer of which `states` says what it keeps. It stands where attention does, and is called alike.

    index: which of the model's caches is this layer's. The model sets it and `group` once it knows all of its layers.
    """

    keeps = STATE

    def __init__(self, index: int, states: Sequence[StatePart]) -> None:
        super().__init__()
        self.index, self.group = index, 0
        self.states = tuple(states)

    def forward(self, residual: torch.Tensor, norm: Norm, ctx: StepContext) -> torch.Tensor:
        """`residual += mix(norm(residual))` in place, [tokens, hidden]; returns it."""
        return self.add(residual, norm, residual, ctx)

    def attend(self, x: torch.Tensor, norm: Norm | None, ctx: StepContext) -> torch.Tensor:
        """mix(norm(x)) alone."""
        return self.add(x, norm, None, ctx)

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        """`residual += mix(norm(x))` in place; without a residual, mix(norm(x)). Moves the rows' states on."""
        raise NotImplementedError

    def _place(self, ctx: StepContext) -> tuple[StateCache, Rows]:
        """Where its states lie, and what it must know of the step's rows."""
        cache, rows = ctx.caches[self.index], ctx.groups[self.group].plan
        assert isinstance(cache, StateCache)
        assert isinstance(rows, Rows)
        return cache, rows


class Conv(nn.Module):
    """Weights of a convolution of each channel by itself: [channels, 1, taps], as checkpoints have them."""

    def __init__(self, channels: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None

    def state(self) -> StatePart:
        """The inputs that the next output needs, in the model's type."""
        channels, _, taps = self.weight.shape
        return StatePart((channels, taps - 1), self.weight.dtype)
