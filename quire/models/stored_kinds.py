"""Which matrices of a quantized checkpoint its files have in plain numbers, and which not, whatever its settings say.

Makers leave more out than they tell of: transformers quantizes no experts that are one tensor in its memory, and not
the head, whatever its name; and its lists of modules have rules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from quire.foundation.errors import WeightsError
from quire.layers.experts import Experts
from quire.models.base import Model
from quire.models.checkpoint_files import file_names, layout_of
from quire.models.safetensors_file import MalformedFileError, SafetensorsFile
from quire.models.spelling import spelling_of
from quire.quantization.base import FLOATS


class StoredKinds(NamedTuple):
    """Modules by the model's names. plain: of which there is a weight in floating point, perhaps a bias, and nothing
    else. packed: of which there is no such weight."""

    plain: frozenset[str] = frozenset()
    packed: frozenset[str] = frozenset()


def stored_kinds(folder: Path, model: Model, *, is_mistral: bool) -> StoredKinds:
    """None, if there are no safetensors files, or none that can be read, or all is plain, which is not what the
    settings say: whoever loads them says so."""
    weights: set[str] = set()
    others: set[str] = set()
    all_plain = True
    for name, dtype in _stored(folder, model, is_mistral=is_mistral):
        module, _, end = name.rpartition(".")
        all_plain = all_plain and dtype in FLOATS
        if dtype in FLOATS and end != "bias":
            weights.add(name)
        if end not in ("weight", "bias") or (end == "weight" and dtype not in FLOATS):
            others.add(module.removesuffix(".weight"))
    if all_plain:
        return StoredKinds()
    of_plain = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
    found = of_plain - others
    for path, layer in model.named_modules():
        if isinstance(layer, Experts):
            found |= set(_of_all_experts(model.checkpoint_name(path), layer, weights))
    return StoredKinds(frozenset(found), frozenset(others - of_plain))


def _stored(folder: Path, model: Model, *, is_mistral: bool) -> Iterator[tuple[str, torch.dtype]]:
    """Tensors that the model knows, by its names, and their types."""
    layout = layout_of(folder, "mistral" if is_mistral else "auto")
    if layout == "gguf":
        return
    found: list[tuple[str, torch.dtype]] = []
    try:
        for file in file_names(folder, layout):
            with SafetensorsFile(folder / file) as opened:
                named = ((model.file_name(tensor), entry.dtype) for tensor, entry in opened.entries.items())
                found += [(name, dtype) for name, dtype in named if name is not None]
    except (WeightsError, OSError, MalformedFileError):
        return
    spelled = spelling_of(model, (name for name, _ in found))
    for name, dtype in found:
        if (known := model.known_name(spelled(name))) is not None:
            yield known, dtype


def _of_all_experts(name: str, experts: Experts, weights: set[str]) -> Iterator[str]:
    """Modules of the first expert, if files have those of all in one plain tensor."""
    gate_up, down = experts.pair
    for linear, whole in ((gate_up, experts.names.all_gate_up), (down, experts.names.all_down)):
        if f"{name}.{whole}" in weights:
            yield from (f"{name}.0.{part}" for part in linear.parts)
