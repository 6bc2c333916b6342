"""GGUF files, read as those of safetensors are: by the names of Hugging Face's form, one tensor an expert.

Matrices that stay in blocks are bytes [rows, bytes of a row]; whatever else is in blocks (embeddings, types that no
product knows) is widened to float32 while it is read. What converters did to tensors is undone on the way: rows of
queries and keys that are ordered by pairs, norms with 1 added, what states fade by. So an entry's place is one of the
file as it would be: entries lie one behind the other in the order of the real ones.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.config.gguf.families import SETTINGS, gguf_family
from quire.config.gguf.family import (
    DECAYS,
    OWN_NORM,
    SPLIT_LATENT,
    GgufFamily,
    base_name,
    decoders_name,
    is_matrix,
    layer_of,
)
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import PLAIN, GgufError, GgufTensor, read_gguf_header
from quire.models.safetensors_file import Entry, MalformedFileError, TensorFile
from quire.quantization.blocks import BLOCKS, widened

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


Places = Mapping[str, tuple[Path, GgufTensor]]
"""Tensors of all parts of a model, by name."""


@dataclass(frozen=True, slots=True)
class _View:
    """Rows of a tensor of the file, and how they are given: as bytes, or as float32 if `widens`. minus: taken from each
    number. decays: what is given is the logarithm of a number's size (`DECAYS`). head: rows of it, if those that turn
    together are neighbours; 0: as they are. shape: what is given, where it is not rows of columns. halves: of a matrix
    that newer files have in two (`SPLIT_LATENT`), wherever they are."""

    name: str
    tensor: GgufTensor
    start: int  # of its first byte in the file
    rows: int
    columns: int
    widens: bool
    minus: float = 0.0
    decays: bool = False
    head: int = 0
    shape: tuple[int, ...] = ()
    halves: tuple[tuple[Path, GgufTensor], ...] = ()

    @property
    def stored(self) -> int:
        """Bytes of a row in the file."""
        return self.columns // self.tensor.type.numbers * self.tensor.type.num_bytes

    @property
    def given(self) -> int:
        """Bytes of a row as it is given."""
        return 4 * self.columns if self.widens else self.stored


class GgufFile(TensorFile):
    """One part of a model. first: the part that has the settings; others are beside it."""

    def __init__(self, path: Path, first: Path) -> None:
        self._first = first
        self._views: list[_View] = []
        self._starts: list[int] = []
        self._made: tuple[_View, np.ndarray[Any, Any]] | None = None
        super().__init__(path)

    def _parse(self, path: Path, size: int) -> dict[str, Entry]:
        del size
        try:
            header = read_gguf_header(path)
            self._metadata = (header if path == self._first else read_gguf_header(self._first)).metadata
            family = gguf_family(self._metadata)
            places = _places(path) if family.latent else {}
        except (GgufError, ConfigError) as error:
            raise MalformedFileError(str(error)) from None
        entries: dict[str, Entry] = {}
        place, last = 0, self._last_layer() if family.ahead else math.inf
        for name, tensor in sorted(header.tensors.items(), key=lambda item: item[1].start):
            if name in SETTINGS or (layer_of(name) or 0) > last:
                continue
            known = decoders_name(family, name) or name
            halved = base_name(name) in SPLIT_LATENT
            for number, view in enumerate(
                _joined(name, places) if halved else self._views_of(name, known, tensor, family)
            ):
                entry = _entry(view, place)
                entries[known.format(number)] = entry
                self._views.append(view)
                self._starts.append(place)
                place += entry.num_bytes
        return entries

    def _last_layer(self) -> int:
        """Behind which are those that predict further tokens."""
        prefix = self._metadata["general.architecture"]
        return (
            int(self._metadata[f"{prefix}.block_count"] - self._metadata.get(f"{prefix}.nextn_predict_layers", 0)) - 1
        )

    def _views_of(self, name: str, known: str, tensor: GgufTensor, family: GgufFamily) -> list[_View]:
        *outer, columns = tensor.shape
        coded = tensor.type.name in BLOCKS and is_matrix(name) and len(tensor.shape) > 1
        base = base_name(name)
        minus = 1.0 if family.plus_one and name.endswith("norm.weight") and base != OWN_NORM else 0.0
        decays = base == DECAYS
        widens = bool(minus) or decays or not (coded or tensor.type.name in PLAIN)
        if "{}" in known:
            experts, rows = outer[0], math.prod(outer[1:])
            size, one = tensor.num_bytes // experts, () if len(outer) > 1 else (columns,)
            return [
                _View(name, tensor, tensor.start + size * number, rows, columns, widens, minus, shape=one)
                for number in range(experts)
            ]
        head = self._head(name, tensor) if family.pairs else 0
        place, dims = family.lifted.get(base, (0, 0))
        shape: tuple[int, ...] = () if outer else (columns,)
        if len(tensor.shape) == dims - 1:
            shape = (*tensor.shape[:place], 1, *tensor.shape[place:])
        elif base in family.flat:
            shape = (math.prod(tensor.shape),)
        if head and not outer:  # a bias: its numbers are its rows
            return [_View(name, tensor, tensor.start, columns, 1, widens, minus, decays, head, shape)]
        return [_View(name, tensor, tensor.start, math.prod(outer), columns, widens, minus, decays, head, shape)]

    def _head(self, name: str, tensor: GgufTensor) -> int:
        """Rows of each head of queries or keys."""
        for kind, key in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
            if name.rpartition(".")[0].endswith(f".{kind}"):
                prefix = f"{self._metadata['general.architecture']}.attention."
                heads = self._metadata.get(f"{prefix}{key}", self._metadata.get(f"{prefix}head_count"))
                heads = max(heads) if isinstance(heads, list) else heads
                return int((tensor.shape[0] if len(tensor.shape) > 1 else tensor.shape[-1]) // heads)
        return 0

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Whole rows, but for rows by themselves: of these a piece."""
        index = bisect.bisect_right(self._starts, offset) - 1
        view, begin = self._views[index], offset - self._starts[index]
        first, last = begin // view.given, -(-(begin + len(buffer)) // view.given)
        inside = begin - first * view.given
        if view.widens or view.head or inside or last - first > view.rows:
            given = self._rows(view, first, last)
            buffer[:] = memoryview(given.view(np.uint8).reshape(-1).data)[inside : inside + len(buffer)]
        else:
            super().read_into(buffer, view.start + begin)

    def _rows(self, view: _View, first: int, last: int) -> np.ndarray[Any, Any]:
        """Those from first to last as they are given, uint8 or float32 [rows, …]."""
        if view.halves:
            if self._made is None or self._made[0] is not view:
                self._made = (view, _whole(view))
            return self._made[1][first:last]
        low, high = (first // view.head * view.head, -(-last // view.head) * view.head) if view.head else (first, last)
        raw = np.empty((high - low, view.stored), dtype=np.uint8)
        super().read_into(memoryview(raw.data).cast("B"), view.start + low * view.stored)
        if view.head:
            half = view.head // 2
            raw = raw.reshape(-1, half, 2, view.stored).swapaxes(1, 2).reshape(high - low, view.stored)
            raw = raw[first - low : last - low]
        if not view.widens:
            return np.ascontiguousarray(raw)
        wide = _widened(np.ascontiguousarray(raw), view.tensor.type.name)
        if view.decays:
            if not (wide < 0).all():
                raise MalformedFileError(f"has numbers >= 0 in {view.name}, by which states would not fade")
            wide = np.log(-wide)
        return np.ascontiguousarray(wide - np.float32(view.minus) if view.minus else wide)


def _entry(view: _View, place: int) -> Entry:
    kind = view.tensor.type.name
    if view.widens:
        dtype, columns = torch.float32, view.columns
    elif kind in PLAIN:
        dtype, columns = _DTYPES[kind], view.columns
    else:
        dtype, columns = torch.uint8, view.stored
    return Entry(dtype, view.shape or (view.rows, columns), place, view.rows * view.given)


def _places(path: Path) -> Places:
    """Raises GgufError, OSError."""
    parts = sorted(path.parent.glob("*.gguf"))
    return {name: (part, tensor) for part in parts for name, tensor in read_gguf_header(part).tensors.items()}


def _joined(name: str, places: Places) -> list[_View]:
    """The matrix that one of its halves is of, once: where its keys' half is, unless the file has it whole too.

    Raises MalformedFileError for a half without the other, or that does not go with it.
    """
    keys, values = (f"{name.rpartition('attn_')[0]}{half}.weight" for half in SPLIT_LATENT)
    if keys not in places or values not in places:
        raise MalformedFileError(f"has {name} without the other half of what makes keys and values")
    shapes = places[keys][1].shape, places[values][1].shape
    fits = all(len(shape) == 3 for shape in shapes) and (shapes[0][0], shapes[0][1]) == (shapes[1][0], shapes[1][2])
    if not fits:
        raise MalformedFileError(f"gives {keys} and {values} the shapes {list(shapes[0])} and {list(shapes[1])}")
    if name != keys or keys.replace("attn_k_b", "attn_kv_b") in places:
        return []
    (heads, rank, nope), value, tensor = shapes[0], shapes[1][1], places[keys][1]
    rows = heads * (nope + value)
    return [_View(name, tensor, tensor.start, rows, rank, widens=True, halves=(places[keys], places[values]))]


def _whole(view: _View) -> np.ndarray[Any, Any]:
    """float32 [heads * (columns of a key + those of a value), rank] of the two halves. Raises MalformedFileError."""
    wide = []
    for path, tensor in view.halves:
        with path.open("rb") as file:
            file.seek(tensor.start)
            raw = np.frombuffer(file.read(tensor.num_bytes), dtype=np.uint8)
        if raw.size < tensor.num_bytes:
            raise MalformedFileError(f"ends inside {view.name}: {tensor.num_bytes - raw.size} bytes too early")
        rows = raw.reshape(math.prod(tensor.shape[:-1]), -1).copy()
        wide.append(_widened(rows, tensor.type.name).reshape(tensor.shape))
    keys, values = wide
    return np.ascontiguousarray(np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(view.rows, view.columns))


def _widened(raw: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Bytes [rows, bytes] → float32 [rows, columns]."""
    if kind in PLAIN:
        tensor = torch.from_numpy(raw).view(_DTYPES[kind]).float()
    else:
        tensor = widened(torch.from_numpy(raw), kind)
    return tensor.numpy()
