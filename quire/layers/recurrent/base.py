"""Layers that keep a state of each request instead of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from quire.attention.context import StateCache, StepContext
from quire.attention.recurrent import StatePart
from quire.distributed.group import Group
from quire.distributed.topology import Topology
from quire.foundation.errors import ConfigError
from quire.kernels.recurrent.rows import Rows
from quire.layers.attention import Keeps
from quire.layers.cuts import Cut, cut_of, cut_parameter, own_targets
from quire.layers.norm import Norm
from quire.layers.targets import Target

STATE = Keeps("state", 1, 1, 0)


class Recurrent(nn.Module):
    """A layer of which `states` says what it keeps. It stands where attention does, and is called alike.

    index: which of the model's caches is this layer's. The model sets it and `group` once it knows all of its layers.
    """

    keeps = STATE
    ranks: Group | None = None  # that share it

    def __init__(self, index: int, states: Sequence[StatePart]) -> None:
        super().__init__()
        self.index, self.group = index, 0
        self.states = tuple(states)

    def share_with(self, topology: Topology) -> None:
        """Keep the states of this rank's share of the heads or channels alone. Raises ConfigError if they cannot be
        shared: so do layers that have no such method of their own."""
        if topology.size > 1:
            raise ConfigError("ranks cannot share states of this kind: it must be 1", "tensor_parallel_size")

    def keep_in(self, dtype: torch.dtype) -> None:
        """Have the states of scans in this type."""
        self.states = tuple(part._replace(dtype=dtype) if part.of_scan else part for part in self.states)

    def join(self, group: Group) -> None:
        """See `quire.layers.cuts.Joining`."""
        self.ranks = group

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
    """Weights of a convolution of each channel by itself: [channels, 1, taps], as checkpoints have them.

    parts: modules beside it that checkpoints have in its place, and the channels of each.
    """

    def __init__(self, channels: int, taps: int, *, bias: bool, parts: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._parts = parts
        self.weight = nn.Parameter(torch.empty(channels, 1, taps), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None

    def cut(self, cut: Cut) -> None:
        """Keep a rank's channels: a run of each part, if there are any."""
        cut_parameter(self, "weight", cut)
        cut_parameter(self, "bias", cut)

    def state(self) -> StatePart:
        """The inputs that the next output needs, in the model's type."""
        channels, _, taps = self.weight.shape
        return StatePart((taps - 1, channels), self.weight.dtype, of_scan=False)

    def stored(self, name: str) -> Iterator[Target]:
        if self._parts is None:
            for own in ("weight", "bias") if self.bias is not None else ("weight",):
                yield from own_targets(self, own, f"{name}.{own}")
            return
        taps, begin, place = self.weight.shape[2], 0, 0
        cut = cut_of(self, "weight")
        for number, (called, count) in enumerate(self._parts.items()):
            module = f"{name.rpartition('.')[0]}.{called}"
            first, last = (begin, begin + count) if cut is None else cut.runs[number]
            part, at = (slice(first - begin, last - begin),), (slice(place, place + last - first),)
            yield Target(f"{module}.weight", (count, 1, taps), self.weight.data, part=part, at=at)
            if self.bias is not None:
                yield Target(f"{module}.bias", (count,), self.bias.data, part=part, at=at)
            begin, place = begin + count, place + last - first
