"""JSON files of a model folder: one clear error that names the file, whatever is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.foundation.errors import ConfigError

_POINTER = b"version https://git-lfs"
FETCH_POINTER = "is a Git LFS pointer and not the file itself: run `git lfs pull` in its folder"
_REQUIRED: Any = object()


def is_lfs_pointer(beginning: bytes) -> bool:
    """Whether a file that begins like this only says where Git LFS keeps the real one."""
    return beginning.startswith(_POINTER)


def read_json(file: Path, option: str, absent: Any = _REQUIRED) -> Any:
    """Whatever `file` holds; `absent`, if it is given, for a file that does not exist.

    option: the one that names the folder. Raises ConfigError for a file that cannot be read or is not JSON.
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        if absent is not _REQUIRED:
            return absent
        raise ConfigError(f"{file} does not exist: is this a model folder?", option) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}", option) from None
    if is_lfs_pointer(data):
        raise ConfigError(f"{file} {FETCH_POINTER}", option)
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}", option) from None


def read_json_object(file: Path, option: str, absent: dict[str, Any] = _REQUIRED) -> dict[str, Any]:
    """The same for a file that must hold an object."""
    found = read_json(file, option, absent)
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {shown(found)}", option)
    return found


def shown(value: Any) -> str:
    """A value for an error message, cut to what fits there."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
