"""EngineArgs: the options of an engine as one flat object, the way scripts for other engines hold them."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import msgspec

from quire.config.engine import EngineConfig
from quire.config.typed_options import OptionFields

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


@dataclass(kw_only=True)
class EngineArgs(OptionFields):
    """Every option by its flat name, with its default."""

    def create_engine_config(self) -> EngineConfig:
        """Raises ConfigError for a value that cannot be."""
        return EngineConfig.from_python(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def add_cli_args(cls, parser: Parser) -> Parser:
        """Let a script's own parser take every option as a flag: `--max-model-len`, or `--max_model_len`."""
        kinds, defaults = typing.get_type_hints(OptionFields), cls()
        for field in dataclasses.fields(cls):
            flags = dict.fromkeys([f"--{field.name.replace('_', '-')}", f"--{field.name}"])
            default = getattr(defaults, field.name)
            parser.add_argument(*flags, dest=field.name, default=default, **_argument(kinds[field.name]))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Those that the script's parser has found; others keep their defaults."""
        names = [field.name for field in dataclasses.fields(cls) if hasattr(args, field.name)]
        return cls(**{name: getattr(args, name) for name in names})


@dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """The same, for `AsyncLLM`."""


def _argument(kind: Any) -> dict[str, Any]:
    """What `add_argument` must know of an option's type."""
    if typing.get_origin(kind) is types.UnionType:  # X | None
        (kind,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
    origin = typing.get_origin(kind)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Literal:
        return {"choices": typing.get_args(kind)}
    if origin is dict:
        return {"type": _json_object, "metavar": "JSON"}
    if origin is not None:  # a list, of integers or of names
        return {"nargs": "*", "type": int if typing.get_args(kind) == (int,) else str}
    return {"type": kind}


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text.encode(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object: {error}") from None
