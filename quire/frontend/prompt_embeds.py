"""Prompts as embeddings: arrays of a caller, or bytes of a client, to one checked float32 array.

Bytes are `.npy` or safetensors with one tensor. Formats that can hold objects are not read at all: neither pickle nor
what `torch.save` writes. No claim of a header is believed before the bytes are there.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
from typing import Any

import msgspec
import numpy as np

from quire.engine.client import EngineInfo
from quire.foundation.errors import InputError

NAME = "prompt_embeds"
_SAFETENSORS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_NPY, _ZIP, _PICKLE = b"\x93NUMPY", b"PK", b"\x80"
_MAX_HEADER = 4096  # bytes


class _Tensor(msgspec.Struct):
    """One entry of a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read(value: Any) -> np.ndarray:
    """float32 [tokens, hidden] of an array or a tensor. Raises InputError for any other shape, type or content."""
    if hasattr(value, "detach"):  # a torch tensor, of which this side of the engine knows no more
        try:
            value = value.detach().to("cpu").float().numpy()
        except (TypeError, RuntimeError, AttributeError) as error:
            raise InputError(f"{NAME} must be a dense tensor: {str(error)[:200]}", NAME) from None
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        got = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise InputError(f"{NAME} must be a tensor or array of floating-point numbers, got {got}", NAME)
    if value.ndim != 2 or not value.size:
        raise InputError(f"{NAME} must have the shape [tokens, hidden size], got {list(value.shape)}", NAME)
    with np.errstate(over="ignore"):
        embeds = np.ascontiguousarray(value, dtype=np.float32)
    if not np.isfinite(embeds).all():
        raise InputError(f"{NAME} must hold finite numbers", NAME)
    return embeds


def decode(text: str) -> np.ndarray:
    """`read` of base64. Raises InputError for what is not one tensor in one of the two formats."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{NAME} must be base64", NAME) from None
    try:
        return read(_npy(data) if data.startswith(_NPY) else _safetensors(data))
    except InputError:
        raise
    except Exception as error:  # numpy reads its headers with several parsers and lets all their errors through
        found = ""
        if data.startswith((_ZIP, _PICKLE)):
            found = " (this looks like torch.save or pickle, which are not read: they can hold code)"
        raise InputError(
            f"{NAME} must be base64 of a .npy file or of safetensors with one tensor{found}: {str(error)[:200]}", NAME
        ) from None


def check(embeds: np.ndarray, info: EngineInfo) -> None:
    """Raises InputError if the engine takes no embeddings, or none of this size."""
    check_enabled(info)
    hidden = info.resolved.info.hidden_size
    if embeds.shape[1] != hidden:
        raise InputError(f"{NAME} must have {hidden} numbers a token (hidden_size), got {embeds.shape[1]}", NAME)


def check_enabled(info: EngineInfo) -> None:
    if not info.resolved.config.model.enable_prompt_embeds:
        raise InputError(f"{NAME} need an engine that was started with enable_prompt_embeds", NAME)


def digest(embeds: np.ndarray) -> bytes:
    """Names the content, for the prefix cache."""
    return hashlib.sha256(str(embeds.shape).encode() + embeds.tobytes()).digest()


def _npy(data: bytes) -> np.ndarray:
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of the format is not known")
    shape, in_columns, dtype = readers[version](stream, max_header_size=_MAX_HEADER)
    if dtype.kind != "f":
        raise ValueError(f"its numbers are {dtype}")
    content = data[stream.tell() :]
    _check_size(shape, dtype.itemsize, len(content))
    return np.frombuffer(content, dtype).reshape(shape, order="F" if in_columns else "C")


def _safetensors(data: bytes) -> np.ndarray:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MAX_HEADER, len(data) - 8):
        raise ValueError("it has no header")
    header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, Any])
    header.pop("__metadata__", None)
    if len(header) != 1:
        raise ValueError(f"it holds {len(header)} tensors")
    tensor = msgspec.convert(next(iter(header.values())), _Tensor)
    if tensor.dtype not in _SAFETENSORS:
        raise ValueError(f"its numbers are {tensor.dtype[:20]!r}")
    content, dtype = data[8 + length :], np.dtype(_SAFETENSORS[tensor.dtype])
    if tensor.data_offsets != (0, len(content)):
        raise ValueError("its header does not fit its length")
    _check_size(tensor.shape, dtype.itemsize, len(content))
    values = np.frombuffer(content, dtype).reshape(tensor.shape)
    if tensor.dtype == "BF16":  # the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _check_size(shape: Any, item: int, num_bytes: int) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) * item != num_bytes:
        raise ValueError(f"{num_bytes} bytes cannot have the shape {list(shape)}")
