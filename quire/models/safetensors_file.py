"""Reading the safetensors format: eight bytes of header length, a JSON header, tensor bytes.

Every claim of the header is checked against the file's length before a byte of data is read, and data is read with
plain reads into memory of ours: a file that lies, or shrinks while it is read, gives an error and never a crash.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from quire.foundation.json_file import FETCH_POINTER, is_lfs_pointer

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class MalformedFileError(Exception):
    """The file is not what its format promises; the message says where."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    num_bytes: int


class TensorFile:
    """An open file; `entries` by tensor name. Raises MalformedFileError or OSError."""

    entries: dict[str, Entry]

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        try:
            self.entries = self._parse(path, os.fstat(self._fd).st_size)
        except BaseException:
            os.close(self._fd)
            raise

    def _parse(self, path: Path, size: int) -> dict[str, Entry]:
        raise NotImplementedError

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the file's bytes from `offset` on."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                end, wanted = os.fstat(self._fd).st_size, offset + len(buffer)
                raise MalformedFileError(f"ends at byte {end}, {wanted - end} bytes too early")
            done += count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)


class SafetensorsFile(TensorFile):
    def _parse(self, path: Path, size: int) -> dict[str, Entry]:
        del path
        return _parse(self._fd, size)


def _parse(fd: int, size: int) -> dict[str, Entry]:
    if is_lfs_pointer(os.pread(fd, 64, 0)):
        raise MalformedFileError(FETCH_POINTER)
    if size < 8:
        raise MalformedFileError(f"is {size} bytes long, too short for a safetensors file")
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise MalformedFileError(f"claims a header of {length} bytes, the file has {size} (is it cut off?)")
    try:
        header = json.loads(os.pread(fd, length, 8))
    except (ValueError, RecursionError) as error:
        raise MalformedFileError(f"has a header that is not JSON: {str(error)[:80]}") from None
    if not isinstance(header, dict):
        raise MalformedFileError("has a header that is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(name, claim, 8 + length, size) for name, claim in header.items()}
    _check_places(entries, 8 + length, size)
    return entries


def _check_places(entries: dict[str, Entry], data_start: int, size: int) -> None:
    """The format wants every byte behind the header to be of exactly one tensor."""
    end, before = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start < end:
            raise MalformedFileError(f"places {name!r} over {before!r}, {end - entry.start} bytes of it")
        if entry.start > end:
            raise MalformedFileError(f"has {entry.start - end} bytes before {name!r} that are of no tensor")
        end, before = entry.start + entry.num_bytes, name
    if end < size:
        raise MalformedFileError(f"has {size - end} bytes behind its last tensor that are of none")


def _entry(name: str, claim: Any, data_start: int, size: int) -> Entry:
    try:
        dtype, shape, (begin, end) = claim["dtype"], claim["shape"], claim["data_offsets"]
        numbers = [begin, end, *shape]
    except (TypeError, KeyError, ValueError):
        raise MalformedFileError(f"describes {name!r} without dtype, shape and data_offsets") from None
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers) or len(shape) > MAX_DIMS:
        raise MalformedFileError(f"gives {name!r} a shape or offsets that cannot be")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise MalformedFileError(f"gives {name!r} the unknown dtype {str(dtype)[:20]!r}")
    needed = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != needed:
        raise MalformedFileError(f"gives {name!r} {end - begin} bytes, its shape {shape} of {dtype} needs {needed}")
    if data_start + end > size:
        raise MalformedFileError(
            f"ends at byte {size}, but its header places {name!r} up to byte {data_start + end} (is it cut off?)"
        )
    return Entry(_DTYPES[dtype], tuple(shape), data_start + begin, needed)
