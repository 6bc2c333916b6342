"""Typed reads of a model's config.json: one clear error instead of a surprise deep inside a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

from quire.foundation.errors import ConfigError

T = TypeVar("T", bool, int, float, str)
D = TypeVar("D")

_REQUIRED: Any = object()
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


@overload
def read(kind: type[T], config: Mapping[str, Any], key: str) -> T: ...
@overload
def read(kind: type[T], config: Mapping[str, Any], key: str, default: D) -> T | D: ...
def read(kind: Any, config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> Any:
    """`config[key]` as `kind`; `default` if the key is absent or null.

    Raises ConfigError naming the key if it is absent without a default or of another type. Integers pass as
    numbers, booleans do not.
    """
    value = config.get(key)
    if value is None:
        if default is _REQUIRED:
            raise ConfigError(f"config.json lacks {key!r}", key)
        return default
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"config.json: {key} must be {_NAMES[kind]}, got {value!r}", key)
    return float(value) if kind is float else value


def read_positive(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    """An integer of at least 1: a size or a count. Raises ConfigError otherwise."""
    value: int = read(int, config, key, default)
    if value < 1:
        raise ConfigError(f"config.json: {key} must be >= 1, got {value}", key)
    return value
