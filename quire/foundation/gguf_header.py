"""What a GGUF file says ahead of its numbers: metadata by key, and each tensor's type, shape and place.

Everything is checked against the file's length before it is believed, so a file that lies gives an error that says
where. No byte of a tensor is read. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_DEPTH = 2  # of arrays in arrays
MAX_ENTRIES = 1_000_000  # tensors, or keys


class BlockType(NamedTuple):
    """Numbers of a row are stored in blocks."""

    name: str
    numbers: int  # in a block
    num_bytes: int  # that it takes


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}
PLAIN = ("F32", "F16", "BF16")
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """The file is not what its format promises; the message says where."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: the slowest dimension first, unlike in the file. start: of its bytes in the file."""

    type: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.numbers * self.type.num_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises GgufError, or OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise GgufError(f"is {size} bytes long, too short for a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(data, size)
            except (struct.error, IndexError):
                raise GgufError(f"ends inside its header, at byte {size} (is it cut off?)") from None
            except UnicodeDecodeError as error:
                raise GgufError(f"has a name that is no UTF-8: {error}") from None


def _header(data: mmap.mmap, size: int) -> GgufHeader:
    if data[:4] != MAGIC:
        raise GgufError("does not begin with GGUF")
    version, num_tensors, num_keys = struct.unpack_from("<IQQ", data, 4)
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        swapped = " (it may be of a machine of the other byte order)" if version > 0xFFFF else ""
        raise GgufError(f"is of version {version} of its format; {known} are known{swapped}")
    if max(num_tensors, num_keys) > MAX_ENTRIES:
        raise GgufError(f"claims {num_tensors} tensors and {num_keys} keys")
    reader = _Reader(data, 24)
    metadata = {}
    for _ in range(num_keys):
        key = reader.text()
        metadata[key] = reader.value(reader.number("<I"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise GgufError(f"has general.alignment={alignment!r}")
    found = [_tensor(reader) for _ in range(num_tensors)]
    begin = -(-reader.place // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in found:
        if name in tensors:
            raise GgufError(f"has the tensor {name!r} twice")
        placed = GgufTensor(tensor.type, tensor.shape, begin + tensor.start)
        if placed.start + placed.num_bytes > size:
            end = placed.start + placed.num_bytes
            raise GgufError(f"ends at byte {size}, but places {name!r} up to byte {end} (is it cut off?)")
        tensors[name] = placed
    return GgufHeader(metadata, tensors)


def _tensor(reader: _Reader) -> tuple[str, GgufTensor]:
    name = reader.text()
    count = reader.number("<I")
    if not 0 < count <= MAX_DIMS:
        raise GgufError(f"gives {name!r} {count} dimensions")
    shape = tuple(reader.number("<Q") for _ in range(count))[::-1]
    number, start = reader.number("<I"), reader.number("<Q")
    if number not in TYPES:
        raise GgufError(f"gives {name!r} the type {number}, which is not supported")
    kind = TYPES[number]
    if math.prod(shape) >= 1 << 48 or 0 in shape or shape[-1] % kind.numbers:
        raise GgufError(f"gives {name!r} the shape {list(shape)}, which {kind.name} cannot have")
    return name, GgufTensor(kind, shape, start)


class _Reader:
    """Goes through the header. Raises struct.error or GgufError where it ends too early."""

    def __init__(self, data: mmap.mmap, place: int) -> None:
        self._data, self.place = data, place

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self.place)
        self.place += struct.calcsize(form)
        return value

    def text(self) -> str:
        return self._bytes().decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._bytes().decode("utf-8", errors="surrogateescape")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY or depth >= MAX_DEPTH:
            raise GgufError(f"has a value of the unknown kind {kind} at byte {self.place}")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            form = f"<{count}{_SCALARS[inner][1:]}"
            if count > len(self._data):
                raise GgufError(f"claims an array of {count} numbers at byte {self.place} (is it cut off?)")
            values = list(struct.unpack_from(form, self._data, self.place))
            self.place += struct.calcsize(form)
            return values
        if count > len(self._data) - self.place:
            raise GgufError(f"claims an array of {count} entries at byte {self.place} (is it cut off?)")
        return [self.value(inner, depth + 1) for _ in range(count)]

    def _bytes(self) -> bytes:
        (length,) = struct.unpack_from("<Q", self._data, self.place)
        begin = self.place + 8
        if length > len(self._data) - begin:
            raise struct.error("too long")
        self.place = begin + length
        return self._data[begin : self.place]
