"""Typed reads of a model's JSON files: one clear error instead of a surprise deep inside a layer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, overload

from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown

T = TypeVar("T", bool, int, float, str)
D = TypeVar("D")

MAX_SIZE = 2**31 - 1  # of anything counted: what kernels index with
_REQUIRED: Any = object()
_NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}


@overload
def read(kind: type[T], config: Mapping[str, Any], key: str, *, file: str = ...) -> T: ...
@overload
def read(kind: type[T], config: Mapping[str, Any], key: str, default: D, *, file: str = ...) -> T | D: ...
def read(kind: Any, config: Mapping[str, Any], key: str, default: Any = _REQUIRED, *, file: str = "config.json") -> Any:
    """`config[key]` as `kind`; `default` if the key is absent or null.

    file: whose key it is, for errors. Raises ConfigError naming file and key if it is absent without a default or of
    another type. Integers pass as numbers, booleans do not.
    """
    value = config.get(key)
    if value is None:
        if default is _REQUIRED:
            raise ConfigError(f"{file} lacks {key!r}", key, code="model-files")
        return default
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{file}: {key} must be {_NAMES[kind]}, got {shown(value)}", key, code="model-files")
    if kind is not float:
        return value
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{file}: {key} must be {_NAMES[kind]}, got {shown(value)}", key, code="model-files")
    return number


def read_positive(config: Mapping[str, Any], key: str, default: Any = _REQUIRED, *, file: str = "config.json") -> int:
    """An integer of at least 1: a size or a count. Raises ConfigError otherwise."""
    return read_count(config, key, default, least=1, file=file)


def read_count(
    config: Mapping[str, Any], key: str, default: Any = _REQUIRED, *, least: int = 0, file: str = "config.json"
) -> int:
    """An integer of at least `least`. Raises ConfigError otherwise."""
    value: int = read(int, config, key, default, file=file)
    if value < least:
        raise ConfigError(f"{file}: {key} must be >= {least}, got {shown(value)}", key, code="model-files")
    if value > MAX_SIZE:
        raise ConfigError(f"{file}: {key} must be <= {MAX_SIZE}, got {shown(value)}", key, code="model-files")
    return value


def read_section(config: Mapping[str, Any], key: str, *, file: str = "config.json") -> Mapping[str, Any]:
    """An object inside a file, {} if it is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{file}: {key} must be an object, got {shown(value)}", key, code="model-files")
    return value


def check_integers(value: Any, key: str, *, file: str = "config.json") -> None:
    """Raises ConfigError for an integer of more than 64 bits, which no size is and no message between processes takes.

    value: of that key; of objects and lists in it, all that they hold.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            check_integers(inner, f"{key}.{name}" if key else str(name), file=file)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_integers(inner, key, file=file)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{file}: {key} must have at most 64 bits, got {shown(value)}", key, code="model-files")


def without_long_integers(config: Mapping[str, Any], checked: Collection[str], *, file: str) -> dict[str, Any]:
    """A file's values without those of keys that mean nothing here and hold such integers. checked: keys that mean
    something. Raises ConfigError as `check_integers` for one of these."""
    kept = {}
    for key, value in config.items():
        try:
            check_integers(value, key, file=file)
        except ConfigError:
            if key in checked:
                raise
        else:
            kept[key] = value
    return kept
