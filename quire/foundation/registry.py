"""Names that stand for code: "package.module:Object", imported on first use, extended by installed packages."""

from __future__ import annotations

import difflib
import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from quire.foundation.errors import ConfigError
from quire.foundation.log import get_logger

PREFIX = "quire."  # of the groups of entry points
_log = get_logger(__name__)


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


class Plugin(NamedTuple):
    """What an installed package has registered."""

    package: str
    group: str  # of entry points
    name: str
    target: str

    def __str__(self) -> str:
        return f"{self.target} of the package {self.package} (entry point {self.name} of the group {self.group})"


@cache
def installed_plugins() -> dict[str, list[Plugin]]:
    """Those of all installed packages, by group. Nothing is imported for that."""
    found: defaultdict[str, list[Plugin]] = defaultdict(list)
    points = entry_points()
    for group in sorted(group for group in points.groups if group.startswith(PREFIX)):
        for point in points.select(group=group):
            package = "unknown" if point.dist is None else point.dist.name
            target = point.value.partition("[")[0].replace(" ", "")  # what stands in brackets is for installers
            found[group].append(Plugin(package, group, point.name, target))
    return dict(found)


class Registry:
    """Implementations of one kind by name. Nothing is imported before it is asked for.

    Others register theirs as entry points of the group `quire.<kind>` (`_` for a space), or with `register`; a name of
    Quire's own cannot be taken over. What is wrong with a plugin is told when it is asked for, and harms nobody else.

    contract: where it is written what an implementation is; needs: the attributes and methods without which it is none.
    is_class: it is a class that makes one. takes_paths: "package.module:Object" is a name as well, and so is that of a
    class which was handed over in this process.
    """

    def __init__(
        self,
        kind: str,
        builtin: Mapping[str, str],
        *,
        contract: str = "",
        needs: Sequence[str] = (),
        is_class: bool = False,
        takes_paths: bool = False,
    ) -> None:
        self.kind = kind
        self.contract, self.needs, self.is_class = contract, tuple(needs), is_class
        self._targets: dict[str, Any] = dict(builtin)
        self._takes_paths = takes_paths
        self._given: dict[str, Any] = {}  # objects by their paths
        self._plugins: dict[str, list[Plugin]] | None = None

    @property
    def group(self) -> str:
        """Of entry points."""
        return PREFIX + self.kind.lower().replace(" ", "_")

    def __iter__(self) -> Iterator[str]:
        """All names: the built-in ones first, in the order they were given, then the plugins'."""
        return iter([*self._targets, *self._installed()])

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in self._installed()

    def check(self, name: str, option: str | None = None) -> None:
        """Raises ConfigError naming the known ones if `name` is none of them; nothing is imported for that."""
        if name in self or (self._takes_paths and ":" in name):
            return
        near = difflib.get_close_matches(name, list(self), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(self) or "none"
        path = ", or a path like package.module:Object" if self._takes_paths else ""
        raise _error(f"unknown {self.kind} {name!r}{hint} (known: {known}{path})", option)

    def get(self, name: str, option: str | None = None) -> Any:
        """The object registered as `name`.

        Raises ConfigError: there is none (with the known names), it cannot be imported, or it is no such thing.
        """
        self.check(name, option)
        plugins = self._installed()
        if name in self._targets:
            target = self._targets[name]
            return load(target) if isinstance(target, str) else target
        if name in self._given:
            return self._checked(self._given[name], repr(name), option)
        if name not in plugins:
            return self._loaded(name, repr(name), option)
        plugin, *others = plugins[name]
        if others:
            rivals = " and ".join(map(str, plugins[name]))
            raise _error(f"the {self.kind} {name!r} is two things: {rivals}; uninstall one of them", option)
        return self._loaded(plugin.target, f"{name!r}, {plugin},", option)

    def register(self, name: str, found: Any) -> None:
        """Add an object, or its path, under a new name. Raises ConfigError if the name is taken or the object none."""
        if name in self:
            raise ConfigError(f"the {self.kind} {name!r} is registered already")
        self._targets[name] = found if isinstance(found, str) else self._checked(found, repr(name), None)

    def name_of(self, given: Any, option: str | None = None) -> str:
        """The name, in this process at least, of what a user gives: a name already, or a class.

        Raises ConfigError for anything else.
        """
        if isinstance(given, str):
            return given
        if not isinstance(given, type):
            raise ConfigError(f"{option or self.kind} must hold classes or names of classes, got {given!r}", option)
        name = f"{given.__module__}:{given.__qualname__}"
        self._given[name] = given
        return name

    def _loaded(self, target: str, shown: str, option: str | None) -> Any:
        """What is not Quire's own."""
        try:
            found = load(target)
        except Exception as error:
            why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            raise _error(f"the {self.kind} {shown} cannot be imported: {why}", option) from error
        return self._checked(found, shown, option)

    def _checked(self, found: Any, shown: str, option: str | None) -> Any:
        lacking = [name for name in self.needs if not hasattr(found, name)]
        if self.is_class and not callable(found):
            why = f"it must be a class, and is {_shown(found)}"
        elif lacking:
            why = f"{_shown(found)} lacks {', '.join(lacking)}"
        else:
            return found
        see = f" (see {self.contract.replace(':', '.')})" if self.contract else ""
        raise _error(f"{shown} is no {self.kind}: {why}{see}", option)

    def _installed(self) -> dict[str, list[Plugin]]:
        """By name, those that may be used; two or more of one name may not."""
        if self._plugins is None:
            self._plugins = {}
            for plugin in installed_plugins().get(self.group, ()):
                if plugin.name in self._targets:
                    _log.warning("%s is not used: Quire has a %s of that name", plugin, self.kind)
                elif plugin not in self._plugins.setdefault(plugin.name, []):
                    self._plugins[plugin.name].append(plugin)
        return self._plugins


def _shown(found: Any) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"an object of type {type(found).__name__}"


def _error(message: str, option: str | None) -> ConfigError:
    return ConfigError(f"{option}: {message}" if option else message, option)
