"""Names that stand for code: "package.module:Object", imported on first use, extended by installed plugins."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from quire.foundation.errors import ConfigError


def load(target: str) -> Any:
    """The object that "package.module:Object" names.

    Raises ConfigError if the module or the object is not there; an error inside the module stays what it is.
    """
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, but something that it imports is not
        raise ConfigError(f"{target!r}: there is no module {error.name!r}") from None
    for part in path.split(".") if path else ():
        if not hasattr(found, part):
            raise ConfigError(f"{target!r}: module {module_name!r} has no {part!r}")
        found = getattr(found, part)
    return found


class Registry:
    """Implementations of one kind by name. Nothing is imported before it is asked for.

    Others register theirs as entry points of the group `quire.<kind>` (`_` for a space), or with `register`; a built-in
    name cannot be taken over.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str]) -> None:
        self.kind = kind
        self._targets: dict[str, Any] = dict(builtin)
        self._plugins_read = False

    def __iter__(self) -> Iterator[str]:
        """All names: the built-in ones first, in the order they were given, then the plugins'."""
        self._read_plugins()
        return iter(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in list(self)

    def check(self, name: str, option: str | None = None) -> None:
        """Raises ConfigError naming the known ones if `name` is none of them; nothing is imported for that."""
        if name not in self:
            near = difflib.get_close_matches(name, self._targets, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(self._targets) or "none"
            raise ConfigError(f"unknown {self.kind} {name!r}{hint} (known: {known})", option)

    def get(self, name: str) -> Any:
        """The object registered as `name`. Raises ConfigError naming the known ones."""
        self.check(name)
        target = self._targets[name]
        return load(target) if isinstance(target, str) else target

    def register(self, name: str, found: Any) -> None:
        """Add an object under a new name. Raises ConfigError if the name is taken."""
        if name in self:
            raise ConfigError(f"the {self.kind} {name!r} is registered already")
        self._targets[name] = found

    def _read_plugins(self) -> None:
        if self._plugins_read:
            return
        self._plugins_read = True
        for point in entry_points(group=f"quire.{self.kind.replace(' ', '_')}"):
            self._targets.setdefault(point.name, point.value)
