"""Where the tensors of a checkpoint go: each a part of one into a part of a layer's memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch

from quire.quantization.base import FLOATS, Spec, Tensors

Part = tuple[slice, ...]
Place = tuple[slice | int | None, ...]
"""Of a tensor, by its first dimensions; what is left out is taken whole. None: a dimension of length 1 more."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """`into[at] = source[part]`, converted to into's dtype; a tensor may have several, into several places.

    shape, dtypes: what the whole stored tensor must be. transposed: the last two dimensions of `into` as it is stored
    are turned. is_elsewhere: it is another rank's, and is not read. is_optional: the checkpoint may lack it.
    is_ragged: the stored tensor may be shorter than its one dimension says.
    """

    source: str
    shape: tuple[int, ...]
    into: torch.Tensor | Staged
    dtypes: tuple[torch.dtype, ...] = FLOATS
    part: Part = ()
    at: Place = ()
    transposed: bool = False
    is_optional: bool = False
    is_ragged: bool = False
    is_elsewhere: bool = False

    @classmethod
    def elsewhere(cls, source: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOATS) -> Target:
        """A tensor that there must be, of another rank."""
        return cls(source, shape, torch.empty(0, device="meta"), dtypes, is_elsewhere=True)

    def fits(self, stored: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape is what is meant: one number may have any number of dimensions."""
        if self.is_ragged:
            return len(stored) == 1 and stored[0] <= self.shape[0]
        return stored == self.shape or math.prod(stored) == math.prod(self.shape) == 1

    def cut_to(self, stored: tuple[int, ...]) -> Target:
        """Of a tensor of that shape, which fits."""
        if not self.is_ragged:
            return self
        lines = slice(0, stored[0])
        return replace(self, shape=stored, part=(), at=(*self.at[:-1], lines))

    def memory(self) -> torch.Tensor:
        """What is to be filled, of the part's shape."""
        whole = self.into if isinstance(self.into, torch.Tensor) else self.into.staging.tensors()[self.into.name]
        return whole[self.at].mT if self.transposed else whole[self.at]


@runtime_checkable
class HasTargets(Protocol):
    """A layer whose parameters are no tensors of checkpoints, each as it is."""

    def targets(self) -> Iterable[Target]: ...


@runtime_checkable
class HasForms(Protocol):
    """The same of a layer that takes what checkpoints have in several forms."""

    def targets_in(self, stored: Mapping[str, tuple[int, ...]]) -> Iterable[Target]:
        """stored: the shapes of what the checkpoint has, by name."""
        ...


@runtime_checkable
class HasStored(Protocol):
    """A layer some of whose parameters are no tensors of checkpoints. name: of the layer, in checkpoints."""

    def stored(self, name: str) -> Iterable[Target]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A tensor of a staging."""

    staging: Staging
    name: str


class Staging:
    """Memory for what a matrix is made of, from its first source until all have been read; then it is packed.

    So a model that is quantized while it loads needs memory for a few matrices besides its own. One for each layer's
    matrix; any thread may call. defaults: of sources that may not come.
    """

    def __init__(
        self,
        specs: Mapping[str, Spec],
        device: torch.device,
        pack: Callable[[Tensors], Tensors],
        into: Tensors,
        defaults: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._specs, self._device, self._pack, self._into = specs, device, pack, into
        self._defaults = defaults
        self._lock = threading.Lock()
        self._tensors: dict[str, torch.Tensor] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Allocated at the first call."""
        with self._lock:
            if not self._tensors:
                self._tensors = {
                    name: torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                    for name, spec in self._specs.items()
                }
                for name, default in self._defaults.items():
                    self._tensors[name].fill_(default)
            return self._tensors

    def finish(self) -> None:
        """Pack what has been read into the layer's tensors and let it go; on the current stream."""
        store(self._into, self._pack(self._tensors))
        self._tensors = {}


def store(into: Tensors, packed: Tensors) -> None:
    """Copy a matrix's tensors to the layer's own. Raises ValueError if they are not the same ones."""
    if into.keys() != packed.keys():
        raise ValueError(f"a matrix is kept as {', '.join(into)}, and was packed as {', '.join(packed)}")
    for name, tensor in packed.items():
        into[name].copy_(tensor)
