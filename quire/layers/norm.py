"""Norms. An RMS norm is but a weight and an epsilon: it is computed by whoever reads the normed values, products and
the rotary kernel, or by the sum over ranks that made them. Where nobody does, and for the others, `forward` does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.distributed.group import Group
from quire.distributed.topology import Topology
from quire.kernels.across_ranks import reduce_add, reduce_add_norm
from quire.kernels.elementwise.norm import add_rms_norm, layer_norm, rms_norm
from quire.kernels.summands import Summands
from quire.layers.cuts import Cut, cut_parameter, own_targets, square_sums
from quire.layers.targets import Staged, Staging, Target
from quire.quantization.base import Spec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, 2019).

    plus_one: checkpoints have what is to be added to 1 (Gemma). The sum is kept, in float32 as it is computed.
    """

    def __init__(self, size: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.eps, self.plus_one = eps, plus_one
        dtype = torch.float32 if plus_one else None
        self.weight: torch.Tensor = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.take(x)
        return rms_norm(x, self.weight, self.eps) if given is None else given

    def give(self, x: torch.Tensor, normed: torch.Tensor) -> None:
        """What whoever reads the rows of x next, before they change, need not compute."""
        self._given = x, normed

    def take(self, x: torch.Tensor) -> torch.Tensor | None:
        """What is given of x, once; None: it is to be computed."""
        given = self._given
        if given is None:
            return None
        self._given = None
        return given[1] if given[0] is x else None

    def stored(self, name: str) -> Iterator[Target]:
        if self.plus_one:
            yield _plus_one(f"{name}.weight", self.weight)
        else:
            yield from own_targets(self, "weight", f"{name}.weight")


@dataclass(frozen=True, slots=True)
class Next:
    """The norm that reads the residual stream next: no module of whoever adds to it."""

    norm: RMSNorm


def add_over_ranks(
    partial: torch.Tensor | Summands, residual: torch.Tensor | None, group: Group, reader: Next | None
) -> torch.Tensor:
    """`residual += the sum of all ranks' partial` in place, [tokens, n]; without a residual, the sum. May overwrite
    `partial`. reader: is given what it would make of the residual."""
    if residual is None:
        partial = partial if isinstance(partial, torch.Tensor) else partial.sum()
        return reduce_add(partial, torch.zeros_like(partial), group)
    if reader is None:
        return reduce_add(partial, residual, group)
    norm = reader.norm
    normed = reduce_add_norm(partial, residual, (norm.weight, norm.eps), group)
    if normed is not None:
        norm.give(residual, normed)
    return residual


class UnitNorm(RMSNorm):
    """An RMS norm without weights, for those who know of such with weights: these are 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.weight.data.fill_(1)

    def stored(self, name: str) -> Iterator[Target]:  # noqa: ARG002 (checkpoints have nothing of it)
        yield from ()


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) · weight + bias (Ba et al., 2016).

    weight, bias: whether there are any. plus_one: as `RMSNorm`, but in the type of the model (Nemotron), which is what
    they are kept in unless there is a `dtype`.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        weight: bool = True,
        bias: bool = True,
        plus_one: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.size, self.plus_one = eps, size, plus_one
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if weight else None
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def stored(self, name: str) -> Iterator[Target]:
        if self.weight is not None:
            weight = f"{name}.weight"
            yield _plus_one(weight, self.weight) if self.plus_one else _as_it_is(weight, self.weight)
        if self.bias is not None:
            yield _as_it_is(f"{name}.bias", self.bias)


class HeadNorms(nn.Module):
    """A layer norm of each head's own: x [tokens, heads, head_dim], weight [heads, head_dim].

    one_by_one: checkpoints have a tensor a head, `norms.0.weight` and so on.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, *, one_by_one: bool = False) -> None:
        super().__init__()
        self.eps, self.one_by_one, self._heads, self._first = eps, one_by_one, heads, 0
        self.weight = nn.Parameter(torch.empty(heads, head_dim), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x.float(), self.weight.shape[1:], None, None, self.eps)
        return (y * self.weight).to(x.dtype)

    def share_with(self, topology: Topology) -> None:
        """Keep the norms of this rank's heads. Raises ConfigError if heads do not divide."""
        cut = Cut.of([(self._heads, self._heads)], topology)
        ((self._first, _),) = cut.runs
        cut_parameter(self, "weight", cut)

    def stored(self, name: str) -> Iterator[Target]:
        if not self.one_by_one:
            yield from own_targets(self, "weight", f"{name}.weight")
            return
        for head in range(self._heads):
            source, own = f"{name}.norms.{head}.weight", head - self._first
            if 0 <= own < len(self.weight):
                yield _as_it_is(source, self.weight.data[own])
            else:
                yield Target.elsewhere(source, tuple(self.weight.shape[1:]))


def norm_across(
    norms: Sequence[RMSNorm], parts: Sequence[torch.Tensor], copies: Sequence[int], topology: Topology, group: Group
) -> list[torch.Tensor]:
    """RMS norms of lines whose columns ranks share. norms: with the weights of this rank's columns.

    parts: [tokens, columns] each. copies: ranks that keep the same columns of a part.
    """
    wide = [part.float() for part in parts]
    squares = torch.stack([x.square().sum(1) / count for x, count in zip(wide, copies, strict=True)], 1)
    every = square_sums(squares, group)
    normed = []
    for place, (norm, x, count) in enumerate(zip(norms, wide, copies, strict=True)):
        total = x.shape[1] * topology.size // count
        scale = torch.rsqrt(every[:, place, None] / total + norm.eps)
        normed.append((x * scale * norm.weight.float()).to(parts[place].dtype))
    return normed


class NoNorm(nn.Module):
    """Of models that have none where others do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


Norm = RMSNorm | LayerNorm | NoNorm


def add_normed(residual: torch.Tensor, x: torch.Tensor, norm: Norm, scale: float = 1.0) -> torch.Tensor:
    """`residual += scale · norm(x)` in place; returns it."""
    if isinstance(norm, RMSNorm):
        return add_rms_norm(residual, x, norm.weight, norm.eps, scale)
    return residual.add_(norm(x), alpha=scale)


def _as_it_is(source: str, tensor: torch.Tensor) -> Target:
    return Target(source, tuple(tensor.shape), tensor.detach())


def _plus_one(source: str, tensor: torch.Tensor) -> Target:
    shape = tuple(tensor.shape)
    staging = Staging(
        {"weight": Spec(shape, tensor.dtype)}, tensor.device, lambda read: {"weight": read["weight"] + 1},
        {"weight": tensor},
    )  # fmt: skip
    return Target(source, shape, Staged(staging, "weight"))
