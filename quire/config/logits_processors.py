"""Names of logits processors → their classes, which users write (`quire.LogitsProcessor`).

A name is "package.module:Class", or what an installed package registered it as (entry points of the group
`quire.logits_processor`). Both the front end, for `validate_params`, and the worker, for the rest, look names up here;
neither keeps anything else of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.foundation.errors import ConfigError
from quire.foundation.registry import Registry, load

LOGITS_PROCESSORS = Registry("logits processor", {})
_given: dict[str, type] = {}  # classes that were handed over in this process, by their names


def name_of(processor: str | type) -> str:
    """The name by which `processor_class` finds it, in this process at least."""
    if isinstance(processor, str):
        return processor
    if not isinstance(processor, type):
        raise ConfigError(
            f"logits_processors must hold classes or names of classes, got {processor!r}", "logits_processors"
        )
    name = f"{processor.__module__}:{processor.__qualname__}"
    _given[name] = processor
    return name


def processor_class(name: str) -> type:
    """Raises ConfigError if there is none of that name."""
    found = _given.get(name)
    if found is None:
        try:
            found = load(name) if ":" in name else LOGITS_PROCESSORS.get(name)
        except ConfigError as error:
            raise ConfigError(f"logits_processors: {error}", "logits_processors") from None
    for method in ("admit", "apply", "validate_params"):
        if not isinstance(found, type) or not callable(getattr(found, method, None)):
            raise ConfigError(
                f"logits_processors: {name!r} is no logits processor: derive a class from quire.LogitsProcessor",
                "logits_processors",
            )
    return found


def processor_classes(names: Sequence[str]) -> list[type]:
    return [processor_class(name) for name in names]
