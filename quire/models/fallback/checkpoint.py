"""Tensors of checkpoints into a model of transformers, renamed, merged and split as transformers does it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from quire.foundation.errors import WeightsError
from quire.layers.targets import Staged, Staging, Target
from quire.quantization.base import FLOATS, Spec, Tensors


@dataclass
class _Conversion:
    """Stored tensors that are made into others together."""

    how: Any  # transformers' WeightConverter
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # by transformers' pattern


class Checkpoint:
    """What a model wants of a checkpoint. causal: the model, whose parameters stay where they are."""

    def __init__(self, causal: Any) -> None:
        self._causal = causal
        loading = import_module("transformers.core_model_loading")
        mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(causal)
        self._rename = loading.rename_source_key
        self._by_number = loading.dot_natural_key
        self._renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
        self._ignored = [re.compile(one) for one in causal._keys_to_ignore_on_load_unexpected or ()]
        self._places: dict[str, torch.Tensor] = causal.state_dict()
        own = {name for name, _ in causal.named_parameters()} | {name for name, _ in causal.named_buffers()}
        first = {tensor.data_ptr(): name for name, tensor in reversed(self._places.items()) if name in own}
        # Names that stand for a tensor which has another one as well: tied weights.
        self._aliases = {
            name: first[tensor.data_ptr()]
            for name, tensor in self._places.items()
            if tensor.numel() and first.get(tensor.data_ptr(), name) != name
        }
        self.twins: dict[str, str] = {}

    def known_name(self, tensor: str) -> str | None:
        """Patterns of what may be there besides are for what the model has no place for: others fit them too."""
        ignored = any(one.search(tensor) for one in self._ignored) and self._renamed(tensor)[0] not in self._places
        return None if ignored else tensor

    def targets(self, stored: Mapping[str, tuple[int, ...]]) -> list[Target]:
        """Raises WeightsError if what is stored cannot be made into what the model wants."""
        direct, conversions = self._sorted(stored)
        self.twins = {}
        for alias, name in self._aliases.items():
            if alias in direct:
                twin = direct.pop(alias)
                if name in direct:
                    self.twins[twin] = direct[name]
                else:
                    direct[name] = twin
        targets = [self._target(source, self._places[name]) for name, source in direct.items()]
        filled = set(direct)
        for first, conversion in conversions.items():
            made, names = self._converted(first, conversion, stored)
            targets += made
            filled |= names
        lacking = self._places.keys() - filled - self._aliases.keys()
        return targets + [self._target(name, self._places[name]) for name in sorted(lacking)]

    def _sorted(self, stored: Iterable[str]) -> tuple[dict[str, str], dict[str, _Conversion]]:
        """The stored name of each tensor of the model that is stored as it is, and the others by the first of what is
        made."""
        by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        direct: dict[str, str] = {}
        conversions: dict[str, _Conversion] = {}
        for name in sorted(stored, key=self._by_number):
            renamed, pattern = self._renamed(name)
            if renamed not in self._places:
                continue  # nobody's: the caller says so
            if pattern is None:
                direct.setdefault(renamed, name)
            else:
                conversion = conversions.setdefault(renamed, _Conversion(by_pattern[pattern]))
                conversion.sources[pattern].append(name)
        return direct, conversions

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """What transformers calls a stored tensor, or the first of what it is made into, and then by which pattern."""
        prefix, places = self._causal.base_model_prefix, self._places
        renamed, pattern = self._rename(name, self._renamings, self._converters, prefix, places)
        return (name, None) if renamed not in places and name in places else (renamed, pattern)

    @staticmethod
    def _target(source: str, into: torch.Tensor) -> Target:
        dtypes = FLOATS if into.dtype in FLOATS else (into.dtype,)
        return Target(source, tuple(into.shape), into.detach(), dtypes)

    def _converted(
        self, first: str, conversion: _Conversion, stored: Mapping[str, tuple[int, ...]]
    ) -> tuple[list[Target], set[str]]:
        """Targets of what is read before it is converted, and the names of what is made of it."""
        sources = [name for names in conversion.sources.values() for name in names]
        dtype = self._places[first].dtype
        empty = {name: torch.empty(stored[name], dtype=dtype, device="meta") for name in sources}
        told = f"{first}, which is made of {sources[0]} and the {len(sources) - 1} that belong to it,"
        try:
            made = self._convert(first, conversion, empty)
        except Exception as error:  # of other people's code, from tensors of any shape
            raise WeightsError(f"the weights do not fit the model: {told} cannot be made: {error}", "model") from None
        if unknown := made.keys() - self._places.keys():
            raise WeightsError(f"the weights do not fit the model, which has no {', '.join(sorted(unknown))}", "model")
        for name, tensor in made.items():
            if tensor.shape != self._places[name].shape:
                raise WeightsError(
                    f"the weights do not fit the model: {told} makes {name} {list(tensor.shape)}, the model needs "
                    f"{list(self._places[name].shape)}",
                    "model",
                )
        into = {name: self._places[name].detach() for name in made}
        staging = Staging(
            {name: Spec(stored[name], dtype) for name in sources},
            self._places[first].device,
            lambda read: self._convert(first, conversion, read),
            into,
        )
        return [Target(name, stored[name], Staged(staging, name)) for name in sources], set(into)

    def _convert(self, first: str, conversion: _Conversion, tensors: Tensors) -> dict[str, torch.Tensor]:
        how = deepcopy(conversion.how)
        for pattern, names in conversion.sources.items():
            how.collected_tensors[pattern] = [tensors[name] for name in names]
        made = how.convert(first, model=self._causal, config=self._causal.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}
