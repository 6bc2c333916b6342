"""Which matrices of a quantized checkpoint its files have in plain numbers, and which not, whatever its settings say.

Makers leave more out than they tell of: transformers quantizes no experts that are one tensor in its memory, and not
the head, whatever its name; and its lists of modules have rules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire.config.files.checkpoint_files import read_header
from quire.foundation.errors import WeightsError
from quire.layers.experts import Experts
from quire.models.base import Model
from quire.models.checkpoint_files import file_names, layout_of
from quire.models.spelling import spelling_of

_PLAIN = ("F64", "F32", "F16", "BF16")


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
        all_plain = all_plain and dtype in _PLAIN
        if dtype in _PLAIN and end != "bias":
            weights.add(name)
        if end not in ("weight", "bias") or (end == "weight" and dtype not in _PLAIN):
            others.add(module.removesuffix(".weight"))
    if all_plain:
        return StoredKinds()
    of_plain = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
    found = of_plain - others
    for path, layer in model.named_modules():
        if isinstance(layer, Experts):
            found |= set(_of_all_experts(model.checkpoint_name(path), layer, weights))
    return StoredKinds(frozenset(found), frozenset(others - of_plain))


def _stored(folder: Path, model: Model, *, is_mistral: bool) -> Iterator[tuple[str, str]]:
    """Tensors that the model knows, by its names, and their types."""
    layout = layout_of(folder, "mistral" if is_mistral else "auto")
    if layout == "gguf":
        return
    try:
        headers = [read_header(folder / name) for name in file_names(folder, layout)]
    except (WeightsError, OSError, ValueError):
        return
    found = [
        (name, entry["dtype"])
        for header in headers
        for tensor, entry in header.items()
        if (name := model.file_name(tensor)) is not None
    ]
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
