"""The check that every option goes through, however it is given: its own annotation."""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown

Positive = Annotated[int, msgspec.Meta(ge=1)]
OrAll = Annotated[int, msgspec.Meta(ge=-1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]


class Options:
    """Base of the sections of options: frozen dataclasses whose fields are checked when they are made.

    Raises ConfigError naming the option, what it may be (its type, and the least number) and what it got. None stands
    for the default of an option that holds a list or an object, and one string for a list of one.
    """

    def __post_init__(self) -> None:
        section: type = type(self)
        least = least_values(section)
        for name, wanted in option_types(section).items():
            value = check_option(name, getattr(self, name), wanted)
            if name in least and value is not None:
                _check_least(name, value, least[name])
            object.__setattr__(self, name, value)


@cache
def option_types(section: type) -> dict[str, Any]:
    """Of the fields of a dataclass, by name."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


@cache
def least_values(section: type) -> dict[str, msgspec.Meta]:
    """Of the options whose annotation says one, by name."""
    return {
        name: meta
        for name, hint in typing.get_type_hints(section, include_extras=True).items()
        for part in (hint, *typing.get_args(hint))
        for meta in getattr(part, "__metadata__", ())
    }


def _check_least(name: str, value: float, least: msgspec.Meta) -> None:
    if least.ge is not None and value < least.ge:
        raise ConfigError(f"{name} must be >= {least.ge}, got {value}", name)
    if least.gt is not None and value <= least.gt:
        raise ConfigError(f"{name} must be > {least.gt}, got {value}", name)


def check_option(name: str, value: Any, wanted: Any) -> Any:
    """The value as `wanted` has it; paths, and the types and numbers of torch and numpy, as plain ones.

    Raises ConfigError.
    """
    origin = typing.get_origin(wanted)
    if value is None and origin in (list, dict):
        return origin()
    value = _plain(value)
    if isinstance(value, str) and wanted == list[str]:
        return [value]
    try:
        found = msgspec.convert(value, wanted)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError):
        raise ConfigError(f"{name} must be {_described(wanted)}, got {shown(value)}", name) from None
    if isinstance(found, float) and not math.isfinite(found):
        raise ConfigError(f"{name} must be a finite number, got {found}", name)
    try:
        msgspec.msgpack.encode(found)  # as it goes to the engine's process
    except OverflowError:
        raise ConfigError(f"{name} must hold no number of more than 64 bits, got {shown(value)}", name) from None
    except UnicodeEncodeError:
        raise ConfigError(f"{name} must be text in UTF-8, got {shown(value)}", name) from None
    except TypeError:
        pass  # an object of a program's own
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    home = type(value).__module__
    if home == "torch":  # torch.bfloat16
        return str(value).removeprefix("torch.")
    return value.item() if home == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


_WORDS = {
    int: "an integer", float: "a number", bool: "true or false", str: "a string", types.NoneType: "None",
}  # fmt: skip


def _described(wanted: Any) -> str:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_described(part) for part in arguments)
    if origin is list:
        return f"a list, each item {_described(arguments[0])}"
    if origin is dict:
        return "an object with strings as keys"
    return _WORDS.get(wanted, str(wanted))
