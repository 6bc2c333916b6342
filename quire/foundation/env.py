"""Every environment variable that Quire reads, in one place, typed. Options of an engine live in `config`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quire.foundation.errors import ConfigError

T = TypeVar("T")


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("must be 0 or 1")


def _level(text: str) -> str:
    if text.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError("must be debug, info, warning or error")
    return text.lower()


@dataclass(frozen=True)
class Variable(Generic[T]):
    name: str
    default: T
    parse: Callable[[str], T]
    doc: str

    def get(self) -> T:
        """The value of now, or the default if unset. Raises ConfigError if the text cannot be read."""
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"environment variable {self.name}={text!r}: {error}", self.name) from None


LOG_LEVEL = Variable[str | None]("QUIRE_LOG_LEVEL", None, _level, "Overrides the log_level option.")
LOG_JSON = Variable[bool]("QUIRE_LOG_JSON", False, _flag, "Log one JSON object a line.")
API_KEY = Variable[str | None]("QUIRE_API_KEY", None, str, "Key that clients of the server must present.")

VARIABLES: tuple[Variable[Any], ...] = (LOG_LEVEL, LOG_JSON, API_KEY)
