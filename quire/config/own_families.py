"""Model families that a program registers: architecture → what builds it.

A family is a module (or an object) with `build(config, max_positions)`, as docs/adding_a_model.md tells. It is known in
every process by its name, "package.module" or "package.module:Object": what is registered as an object is found by
itself in this process only.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from quire.foundation.errors import ConfigError
from quire.foundation.registry import load

_names: dict[str, str] = {}  # by architecture
_given: dict[str, Any] = {}  # objects that were handed over in this process, by their names


def register(architecture: str, family: Any) -> None:
    """Build models of `architecture`, a word of config.json, with `family`; the latest registration counts.

    Raises ConfigError for what can be no family.
    """
    if isinstance(family, str):
        _names[architecture] = family
        return
    if not callable(getattr(family, "build", None)):
        raise ConfigError(f"a model family must have build(config, max_positions), and {family!r} has not", "model")
    if isinstance(family, ModuleType):
        name = family.__name__
    else:
        kind = family if isinstance(family, type) else type(family)
        name = f"{kind.__module__}:{kind.__qualname__}"
    _names[architecture], _given[name] = name, family


def family_name(architecture: str) -> str:
    """Name of the family registered for an architecture; "" if there is none."""
    return _names.get(architecture, "")


def registered() -> list[str]:
    """All architectures with such a family."""
    return sorted(_names)


def find(name: str) -> Any:
    """The family of that name. Raises ConfigError if it is not there, or is none."""
    if name in _given:
        return _given[name]
    found = load(name)
    if not callable(getattr(found, "build", None)):
        raise ConfigError(f"the model family {name!r} has no build(config, max_positions)", "model")
    return found
