"""Definitions of a JSON schema that need themselves: they have no finite value, and an answer that enters one never
ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SCALARS = frozenset(("null", "boolean", "integer", "number", "string"))


def endless(schema: Any, target: Callable[[str], Any]) -> str | None:
    """A reference within `schema` to a definition without a finite value; None if there is none.

    target: what a reference refers to.
    """
    references = _references(schema, target)
    finite: set[str] = set()
    grew = True
    while grew:
        found = {name for name in references - finite if _is_finite(target(name), finite)}
        grew = bool(found)
        finite |= found
    return min(references - finite, default=None)


def _references(schema: Any, target: Callable[[str], Any]) -> set[str]:
    """All that are met from `schema` on."""
    found: set[str] = set()
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            name = one.get("$ref")
            if isinstance(name, str) and name not in found:
                found.add(name)
                left.append(target(name))
            left += [value for keyword, value in one.items() if keyword not in ("enum", "const")]
    return found


def _is_finite(schema: Any, known: set[str]) -> bool:
    """Whether the schema has a finite value if the references in `known` have."""
    if not isinstance(schema, dict):
        return True
    if "const" in schema or "enum" in schema:
        return True
    if "$ref" in schema and schema["$ref"] not in known:
        return False
    if not all(_is_finite(part, known) for part in schema.get("allOf", ())):
        return False
    for union in ("anyOf", "oneOf"):
        if union in schema and not any(_is_finite(part, known) for part in schema[union]):
            return False
    kinds = schema.get("type", "object" if "required" in schema else "array" if "minItems" in schema else "null")
    if not _SCALARS.isdisjoint([kinds] if isinstance(kinds, str) else kinds):
        return True
    if "object" in kinds:
        properties = schema.get("properties", {})
        if all(_is_finite(properties.get(name), known) for name in schema.get("required", ())):
            return True
        if kinds == "object":
            return False
    prefix, count = schema.get("prefixItems", []), schema.get("minItems", 0)
    needed = [*prefix[: int(count)], *([schema.get("items")] if count > len(prefix) else [])]
    return all(_is_finite(item, known) for item in needed)
