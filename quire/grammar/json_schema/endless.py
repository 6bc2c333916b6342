"""Definitions of a JSON schema that need themselves: they have no finite value, and an answer that enters one never
ends.

Each schema is finite if all, or any, of certain others are; so that is a net of counters (Dowling and Gallier, 1984),
and finding out takes as long as reading the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SCALARS = frozenset(("null", "boolean", "integer", "number", "string"))


def endless(schema: Any, target: Callable[[str], Any]) -> str | None:
    """A reference within `schema` to a definition without a finite value; None if there is none.

    target: what a reference refers to.
    """
    net = _Net()
    net.read(schema)
    while net.unread:
        reference = net.unread.pop()
        net.link(net.read(target(reference)), net.references[reference])
    finite = net.finite()
    return min((name for name, node in net.references.items() if node not in finite), default=None)


class _Net:
    """Nodes by number. A node is finite once so many of those it leans on are as `_missing` says."""

    def __init__(self) -> None:
        self.references: dict[str, int] = {}
        self.unread: list[str] = []
        self._missing: list[int] = []
        self._leaning: list[list[int]] = []  # on each node

    def finite(self) -> set[int]:
        left = [node for node, missing in enumerate(self._missing) if missing == 0]
        found = set(left)
        while left:
            for node in self._leaning[left.pop()]:
                self._missing[node] -= 1
                if self._missing[node] == 0:
                    found.add(node)
                    left.append(node)
        return found

    def link(self, node: int, leaning: int) -> None:
        self._leaning[node].append(leaning)

    def _every(self, nodes: list[int]) -> int:
        return self._node(nodes, len(nodes))

    def _any(self, nodes: list[int]) -> int:
        return self._node(nodes, 1)

    def _node(self, nodes: list[int], missing: int) -> int:
        self._missing.append(missing)
        self._leaning.append([])
        for node in nodes:
            self.link(node, len(self._missing) - 1)
        return len(self._missing) - 1

    def _reference(self, name: str) -> int:
        if name not in self.references:
            self.references[name] = self._node([], 1)
            self.unread.append(name)
        return self.references[name]

    def read(self, schema: Any) -> int:
        """The node of a schema, and those of all that it holds."""
        if not isinstance(schema, dict):
            return self._every([])
        parts: dict[str, Any] = {}  # nodes of the schemas within, by keyword
        for keyword, value in schema.items():
            if keyword in ("enum", "const"):
                continue
            if isinstance(value, list):
                parts[keyword] = [self.read(part) for part in value]
            elif isinstance(value, dict):
                is_map = keyword in ("properties", "patternProperties", "$defs", "definitions")
                parts[keyword] = {name: self.read(part) for name, part in value.items()} if is_map else self.read(value)
        needed = [self._reference(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
        if "const" in schema or "enum" in schema:
            return self._every([])
        needed += parts.get("allOf", [])
        needed += [self._any(parts[union]) for union in ("anyOf", "oneOf") if union in parts]
        kinds = schema.get("type", "object" if "required" in schema else "array" if "minItems" in schema else "null")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if _SCALARS.isdisjoint(kinds):
            needed.append(self._any([self._container(kind, schema, parts) for kind in kinds]))
        return self._every(needed)

    def _container(self, kind: str, schema: dict[str, Any], parts: dict[str, Any]) -> int:
        if kind == "object":
            properties = parts.get("properties", {})
            return self._every([properties[name] for name in schema.get("required", ()) if name in properties])
        prefix, count = parts.get("prefixItems", []), int(schema.get("minItems", 0))
        if isinstance(schema.get("items"), list):  # before 2020-12
            return self._every(parts["items"][:count])
        further = [parts["items"]] if "items" in parts and count > len(prefix) else []
        return self._every([*prefix[:count], *further])
