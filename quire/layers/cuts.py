"""Parameters of layers' own, beside matrices, that ranks share by lines: of convolutions, norms and states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from quire.distributed.group import Group
from quire.distributed.topology import Topology
from quire.layers.targets import Target

_CUTS = "_cuts_of_parameters"


@runtime_checkable
class Shared(Protocol):
    """A layer that keeps something by heads or channels beside its matrices."""

    def share_with(self, topology: Topology) -> None:
        """Keep this rank's share alone. Raises ConfigError if it cannot be shared."""
        ...


@runtime_checkable
class Joining(Protocol):
    """A layer that computes something together with the other ranks."""

    def join(self, group: Group) -> None:
        """Be the share of one of several ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's lines of a tensor of `total`: runs [begin, end), kept one behind the other."""

    total: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int]], topology: Topology) -> Cut:
        """parts: (lines, heads) of what lies one behind the other; see `Topology.lines`. Raises ConfigError."""
        runs, begin = [], 0
        for lines, heads in parts:
            share = topology.lines(lines, heads, "heads" if heads < lines else "channels")
            runs.append((begin + share.begin, begin + share.end))
            begin += lines
        return cls(begin, tuple(runs))

    def __len__(self) -> int:
        return sum(end - begin for begin, end in self.runs)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """whole [total, …] → [lines of this rank, …]"""
        return whole if len(self) == self.total else torch.cat([whole[begin:end] for begin, end in self.runs])

    def targets(self, source: str, into: torch.Tensor) -> Iterator[Target]:
        """Of a stored tensor, whole, whose share is `into`."""
        shape, place = (self.total, *into.shape[1:]), 0
        for begin, end in self.runs:
            lines = slice(place, place + end - begin)
            yield Target(source, shape, into, part=(slice(begin, end),), at=(lines,))
            place = lines.stop


def cut_parameter(module: nn.Module, name: str, cut: Cut) -> None:
    """Let the parameter be this rank's share of what it was to be; whoever fills it asks `cut_of`."""
    parameter = getattr(module, name)
    if parameter is None or len(cut) == len(parameter):
        return
    parameter.data = parameter.data.new_empty((len(cut), *parameter.shape[1:]))
    module.__dict__.setdefault(_CUTS, {})[name] = cut


def cut_of(module: nn.Module, name: str) -> Cut | None:
    """None: the parameter is whole."""
    found: Cut | None = module.__dict__.get(_CUTS, {}).get(name)
    return found


def own_targets(module: nn.Module, name: str, source: str) -> Iterator[Target]:
    """Of a parameter that checkpoints have as it is."""
    parameter, cut = module.get_parameter(name), cut_of(module, name)
    if cut is None:
        yield Target(source, tuple(parameter.shape), parameter.data)
    else:
        yield from cut.targets(source, parameter.data)


def square_sums(squares: torch.Tensor, group: Group | None) -> torch.Tensor:
    """squares: float32 [tokens, n], sums of what this rank has → those of all ranks, the same bits on each."""
    return squares if group is None else group.sum(squares.contiguous())
