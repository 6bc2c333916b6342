"""Where the references of a JSON schema lead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import unquote

NOTHING = object()


class References:
    def __init__(self, root: Any) -> None:
        self._root = root

    def find(self, reference: str) -> Any:
        """What a pointer (#/…) or an anchor (#name) leads to, or NOTHING."""
        if not reference.startswith("#/"):
            return self._root if reference == "#" else self._anchors.get(reference[1:], NOTHING)
        found = self._root
        for key in pointer(reference):
            index = int(key) if isinstance(found, list) and key.isdecimal() and len(key) < 6 else key
            try:
                found = found[index]
            except (KeyError, IndexError, TypeError):
                return NOTHING
        return found

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        left = [self._root]
        while left:
            one = left.pop()
            if isinstance(one, list):
                left += one
            elif isinstance(one, dict):
                if isinstance(one.get("$anchor"), str):
                    found.setdefault(one["$anchor"], one)
                left += [value for keyword, value in one.items() if keyword not in ("enum", "const")]
        return found


def pointer(reference: str) -> Iterator[str]:
    """The keys of #/…"""
    for part in reference[2:].split("/"):
        yield unquote(part).replace("~1", "/").replace("~0", "~")
