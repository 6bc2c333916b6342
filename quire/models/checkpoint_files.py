"""Which files of a folder hold the weights, by `load_format`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from quire.foundation.errors import WeightsError


class _Layout(NamedTuple):
    """An index (`listed_in`), or one file, or all of a pattern; endings: of files that an index may name."""

    listed_in: str
    single: str
    pattern: str
    endings: tuple[str, ...]


_LAYOUTS = {
    "safetensors": _Layout(
        "model.safetensors.index.json", "model.safetensors", "*.safetensors", (".safetensors",)
    ),
    "mistral": _Layout(
        "consolidated.safetensors.index.json",
        "consolidated.safetensors",
        "consolidated*.safetensors",
        (".safetensors",),
    ),
    "pt": _Layout("pytorch_model.bin.index.json", "pytorch_model.bin", "*.bin", (".bin", ".pt", ".pth")),
    "gguf": _Layout("model.gguf.index.json", "", "*.gguf", (".gguf",)),
}  # fmt: skip
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "rng_state.pth")


def layout_of(folder: Path, load_format: str) -> str:
    """`load_format`, or the form of what a folder holds if that is left open."""
    is_open = load_format == "auto" and not any(folder.glob("*.safetensors"))
    return "gguf" if is_open and any(folder.glob("*.gguf")) else load_format


def file_names(folder: Path, load_format: str) -> list[str]:
    """Raises WeightsError if there are none, naming the option that reads those that are there instead."""
    layout = _LAYOUTS.get(load_format, _LAYOUTS["safetensors"])
    if (folder / layout.listed_in).exists():
        return _indexed(folder / layout.listed_in, layout.endings)
    names = _matching(folder, layout.pattern)
    if load_format == "pt":
        names = names or [*_matching(folder, "*.pt"), *_matching(folder, "*.pth")]
    elif load_format != "mistral":
        names = [name for name in names if not name.startswith("consolidated")] or names
    if layout.single in names:
        return [layout.single]
    if not names:
        wanted = layout.pattern.removeprefix("*")
        raise WeightsError(f"{folder} holds no {wanted} file{_hint(folder, load_format)}", "model")
    return names


def _matching(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern) if path.name not in _OF_TRAINING)


def _hint(folder: Path, load_format: str) -> str:
    pickled = [name for pattern in ("*.bin", "*.pt", "*.pth") for name in _matching(folder, pattern)]
    if pickled and load_format != "pt":
        return f"; {pickled[0]} is one of torch's own form: load_format=pt reads it, and runs nothing that is in it"
    if load_format in ("pt", "mistral") and _matching(folder, "*.safetensors"):
        return "; load_format=auto reads the .safetensors files that are there"
    if others := _matching(folder, "*.gguf"):
        return f"; {others[0]} is read if it is named itself, or the folder as {folder.name}:TYPE"
    return ""


def _indexed(index: Path, endings: tuple[str, ...]) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise WeightsError(f"{index} is not a safetensors index: a JSON object with a weight_map", "model") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(endings):
            raise WeightsError(f"{index} points to {name!r}, which is no {endings[0]} file beside it", "model")
    return sorted(names)
