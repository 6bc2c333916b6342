"""Names of logits processors → their classes, which users write (`quire.LogitsProcessor`).

A name is "package.module:Class", or what an installed package registered it as (entry points of the group
`quire.logits_processor`). Both the front end, for `validate_params`, and the worker, for the rest, look names up here;
neither keeps anything else of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.foundation.registry import Registry

OPTION = "logits_processors"
LOGITS_PROCESSORS = Registry(
    "logits processor",
    {},
    contract="quire:LogitsProcessor",
    needs=("admit", "apply", "validate_params"),
    is_class=True,
    takes_paths=True,
)


def processor_class(name: str) -> type:
    """Raises ConfigError if there is none of that name."""
    found: type = LOGITS_PROCESSORS.get(name, OPTION)
    return found


def processor_classes(names: Sequence[str]) -> list[type]:
    return [processor_class(name) for name in names]
