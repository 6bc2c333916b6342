"""What the headers of a checkpoint's files say: no byte of a tensor is read, and no torch imported."""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.foundation.gguf_header import TYPES, GgufError, read_gguf_header
from quire.foundation.json_file import FETCH_POINTER, is_lfs_pointer

MAX_HEADER = 100_000_000  # bytes of a safetensors header: the format's own limit
_BITS: dict[str, float] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "U32": 32, "U64": 64, "F4": 4,
    **{kind.name: 8 * kind.num_bytes / kind.numbers for kind in TYPES.values()},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Tensors of safetensors or GGUF files, counted."""

    files: int = 0
    tensors: int = 0
    numbers: Mapping[str, int] = field(default_factory=dict)  # by the format's name of their type
    problems: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return int(sum(self.bytes_by_type.values()))

    @property
    def bytes_by_type(self) -> dict[str, int]:
        """By the format's name of it."""
        return {dtype: int(_BITS.get(dtype, 0) * count / 8) for dtype, count in self.numbers.items()}


def stored_in(folder: Path, *, is_mistral: bool = False) -> Stored:
    """Of a local checkpoint, in Hugging Face's form or Mistral's. Files that its index names and that are not there, or
    cannot be read, are problems."""
    if parts := sorted(folder.glob("*.gguf")):
        return _stored_in_gguf(parts)
    names, problems = _names(folder, "consolidated" if is_mistral else "model")
    numbers: Counter[str] = Counter()
    tensors = files = 0
    for name in names:
        try:
            header = read_header(folder / name)
        except FileNotFoundError:
            problems.append(f"{name} is not there, which the index points to")
        except (OSError, ValueError) as error:
            problems.append(f"{name} {error}")
        else:
            files, tensors = files + 1, tensors + len(header)
            for entry in header.values():
                numbers[entry["dtype"]] += math.prod(entry["shape"])
    return Stored(files=files, tensors=tensors, numbers=dict(numbers), problems=tuple(problems))


def _stored_in_gguf(parts: Sequence[Path]) -> Stored:
    numbers: Counter[str] = Counter()
    tensors, problems = 0, []
    for part in parts:
        try:
            header = read_gguf_header(part)
        except (OSError, GgufError) as error:
            problems.append(f"{part.name} {error}")
            continue
        tensors += len(header.tensors)
        for tensor in header.tensors.values():
            numbers[tensor.type.name] += math.prod(tensor.shape)
    return Stored(files=len(parts), tensors=tensors, numbers=dict(numbers), problems=tuple(problems))


def read_header(file: Path) -> dict[str, Any]:
    """Tensors by name, each an object with dtype and shape. Raises OSError, or ValueError for what is no such file, or
    not all of it."""
    with file.open("rb") as stream:
        if is_lfs_pointer(stream.read(64)):
            raise ValueError(FETCH_POINTER)
        stream.seek(0)
        start = stream.read(8)
        if len(start) < 8:
            raise ValueError("is too short for a safetensors file")
        (size,) = struct.unpack("<Q", start)
        if size > MAX_HEADER:
            raise ValueError(f"claims a header of {size} bytes")
        try:
            header = json.loads(stream.read(size))
        except (ValueError, RecursionError):
            raise ValueError("has a header that is not JSON") from None
        length = stream.seek(0, os.SEEK_END)
    if not isinstance(header, dict):
        raise ValueError("has a header that is not a JSON object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or not _is_shape(entry.get("shape")):
            raise ValueError(f"describes {name!r} without dtype and shape")
    if length < (end := 8 + size + max(map(_end, header.values()), default=0)):
        raise ValueError(f"ends at byte {length}, and its header places tensors up to byte {end} (is it cut off?)")
    return header


def _end(entry: Mapping[str, Any]) -> int:
    """Of a tensor, behind the header; 0 if it does not say."""
    places = entry.get("data_offsets")
    return places[1] if isinstance(places, list) and _is_shape(places) and len(places) == 2 else 0


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(length) is int and length >= 0 for length in value)


def _names(folder: Path, stem: str) -> tuple[list[str], list[str]]:
    """Of the files that a load reads, and what is wrong with the list."""
    index = folder / f"{stem}.safetensors.index.json"
    if index.exists():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return sorted(name for name in named if isinstance(name, str)), []
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return [], [f"{index.name} is not a safetensors index"]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if f"{stem}.safetensors" in names:
        return [f"{stem}.safetensors"], []
    return [name for name in names if name.startswith("consolidated") == (stem == "consolidated")] or names, []
