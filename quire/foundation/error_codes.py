"""The catalogue of errors: what each kind is, what causes it, and what to do. docs/errors.md is made of it.

An error finds its entry by the code it was raised with, else by its class and the field that it names.
"""

from __future__ import annotations

import errno
from functools import cache

from quire.foundation.error_entries import MODELS, REQUESTS, RUNNING, STARTING, Entry
from quire.foundation.errors import QuireError

TITLES = {
    "Commands, options, the machine": STARTING,
    "Models": MODELS,
    "While it runs": RUNNING,
    "Requests": REQUESTS,
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Of an OSError that is a disk's fault and not ours."""


def entry_of(error: BaseException) -> Entry:
    """The entry of anything that was raised."""
    known = entries()
    if isinstance(error, QuireError):
        if error.code is not None:
            return known[error.code]
        field = getattr(error, "field", None) or getattr(error, "param", None)
        for cls in type(error).__mro__:
            table = _by_kind().get(cls, {})
            if found := table.get(_top(field)) or table.get(None):
                return found
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return known["folder"]
    return known["missing-package" if isinstance(error, ModuleNotFoundError) else "internal"]


@cache
def entries() -> dict[str, Entry]:
    return {entry.code: entry for part in TITLES.values() for entry in part}


def _top(field: str | None) -> str | None:
    """`messages[2].content` is about messages."""
    return None if field is None else field.partition(".")[0].partition("[")[0].replace("-", "_")


@cache
def _by_kind() -> dict[type, dict[str | None, Entry]]:
    """Class → field → entry; None: of fields that have no entry of their own."""
    found: dict[type, dict[str | None, Entry]] = {}
    for entry in entries().values():
        for field in entry.fields:
            found.setdefault(entry.kind, {})[None if field == "*" else field] = entry
    return found
