"""Structural tags in the form that xgrammar reads: the common one, less what it does not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.foundation.errors import InputError
from quire.grammar.tags import Format
from quire.grammar.xgrammar.regex import rewritten
from quire.grammar.xgrammar.schema import narrowed
from quire.types.structured import FIELD

MAX_WHITESPACE = 8  # characters between JSON tokens, unless the tag says otherwise


def translated(tag: Format, special: Iterable[str]) -> Format:
    """special: names of special tokens, which are no text. Raises InputError naming what cannot be enforced."""
    return {"type": "structural_tag", "format": _Translator(special).format(tag)}


class _Translator:
    def __init__(self, special: Iterable[str]) -> None:
        self._special = tuple(special)

    def format(self, tag: Format) -> Format:
        found = {name: self._value(name, value) for name, value in tag.items() if name != "style"}
        kind = tag["type"]
        if kind == "json_schema":
            found["json_schema"] = narrowed(tag["json_schema"]) if isinstance(tag["json_schema"], dict) else {}
            found["max_whitespace_cnt"] = self._whitespace(tag.get("max_whitespace_cnt"))
        elif kind == "regex":
            found["pattern"] = rewritten(tag["pattern"], f"{FIELD}: the regex", within_json=False)
        elif kind == "repeat":
            found |= {"min": tag["min"] or 0, "max": -1 if tag["max"] is None else tag["max"]}
        elif kind == "any_text" and tag.get("max_chars") in (None, -1):
            found.pop("max_chars", None)
        return found

    def _value(self, name: str, value: Any) -> Any:
        if name in ("elements", "tags"):
            return [self.format(one) for one in value]
        if name == "content":
            return self.format(value)
        if name != "json_schema":
            for text in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
                self._check(text)
        return value

    def _check(self, text: str) -> None:
        for name in self._special:
            if name in text:
                raise InputError(
                    f"{FIELD}: the structural tag holds the special token {name!r}, "
                    "which the backend xgrammar does not match within texts",
                    FIELD,
                )

    def _whitespace(self, limit: int | None) -> int:
        if limit == 0:
            raise InputError(
                f"{FIELD}: JSON without whitespace (max_whitespace_cnt 0) is not supported by the backend xgrammar",
                FIELD,
            )
        return MAX_WHITESPACE if limit in (None, -1) else int(limit or 0)
