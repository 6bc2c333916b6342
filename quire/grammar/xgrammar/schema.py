"""JSON schemas for xgrammar: what it would leave out in silence is refused by name and path, the rest is made explicit.

The library enforces fewer keywords than it reads, and fewer still beside each other. This table was found by experiment
with version 0.2 (each keyword, alone and beside others, against another library's judgement); tests hold it to that.
Where a schema says nothing about further properties of an object with named ones, there are none: the library's own
default, and such a key could be written with escapes to pass for another.
"""

from __future__ import annotations

import json
import math
from typing import Any

from quire.foundation.errors import InputError
from quire.grammar.json_schema.references import NOTHING, References
from quire.grammar.xgrammar.regex import rewritten
from quire.types.structured import FIELD

Schema = dict[str, Any]
_TYPES = ("string", "number", "boolean", "null", "object", "array")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # each enforced only where nothing stands beside it
_OF_TYPE = {
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": (*_BOUNDS, "multipleOf"),
    "integer": (*_BOUNDS, "multipleOf"),
    "object": (
        *("properties", "patternProperties", "additionalProperties"),
        *("required", "minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
}
_BINDING = {keyword for keywords in _OF_TYPE.values() for keyword in keywords}
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_FORMAT_PATTERNS = {  # for formats that the library takes too widely
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,2}}$",
}
_LONGEST = {"hostname": 3 * 63 + 2}  # of these: characters


def narrowed(schema: Schema) -> Schema:
    """A schema in plain form as xgrammar enforces it. Raises InputError naming the keyword and its path."""
    return _Narrower(schema).run()


class _Narrower:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._references = References(root)
        self._names: dict[str, str] = {}  # of what is referred to
        self._left: list[str] = []

    def run(self) -> Schema:
        found = self._schema(self._root, "$")
        definitions: Schema = {}
        while self._left:
            reference = self._left.pop()
            target = self._references.find(reference)
            if target is NOTHING:
                raise self._refusal(f"refers to {reference!r}, which does not exist", "$")
            definitions[self._names[reference]] = self._schema(target, reference)
        return {**found, "$defs": definitions} if definitions else found

    def _schema(self, schema: Any, path: str) -> Schema:
        if schema is True:
            return {}
        if schema is False:
            raise self._refusal("is false, which the backend xgrammar does not enforce here", path)
        binding = [keyword for keyword in schema if keyword in _BINDING]
        alone = [keyword for keyword in _ALONE if keyword in schema]
        if not alone:
            return self._of_types(schema, binding, path)
        beside = [*alone[1:], *binding]
        if "type" in schema and alone[0] not in ("const", "enum"):
            beside.append("type")
        if beside:
            raise self._refusal(f"has {alone[0]!r} beside {beside[0]!r}, of which only one would be enforced", path)
        return self._only(alone[0], schema, path)

    def _only(self, keyword: str, schema: Schema, path: str) -> Schema:
        value = schema[keyword]
        where = f"{path}.{keyword}"
        if keyword == "$ref":
            if value not in self._names:
                self._names[value] = f"d{len(self._names)}"
                self._left.append(value)
            return {"$ref": f"#/$defs/{self._names[value]}"}
        if keyword in ("const", "enum"):
            values = [one for one in (value if keyword == "enum" else [value]) if _is_of(one, schema.get("type"))]
            if not values:
                raise self._refusal("has no value that its type allows", where)
            return {"enum": values}
        if keyword == "allOf" and len(value) > 1:
            raise self._refusal("has several parts, of which the backend xgrammar enforces none", where)
        branches = [self._schema(one, f"{where}[{i}]") for i, one in enumerate(value) if one is not False]
        if not branches:
            raise self._refusal("has no branch that a value can satisfy", where)
        if keyword == "oneOf" and not self._are_distinct([one for one in value if one is not False]):
            raise self._refusal(
                "has branches that may hold of the same value; tell them apart by types or a required const, "
                "or use anyOf",
                where,
            )
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    # By type

    def _of_types(self, schema: Schema, binding: list[str], path: str) -> Schema:
        kinds = schema.get("type", list(_TYPES))
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        if "type" not in schema and not binding:
            return {}
        unknown = set(kinds) - {*_TYPES, "integer"}
        if unknown:
            raise self._refusal(f"has the unknown type {min(unknown)!r}", path)
        if "number" in kinds:
            kinds = [kind for kind in kinds if kind != "integer"]
        found: Schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
        if "string" in kinds:
            self._add_string(found, schema, path)
        if "number" in kinds or "integer" in kinds:
            self._add_number(found, schema, "integer" in kinds, path)
        if "object" in kinds:
            self._add_object(found, schema, path)
        if "array" in kinds:
            self._add_array(found, schema, path)
        return found

    def _add_string(self, found: Schema, schema: Schema, path: str) -> None:
        given = [keyword for keyword in ("pattern", "format") if keyword in schema]
        is_short = schema.get("maxLength", math.inf) < _LONGEST.get(schema.get("format", ""), math.inf)
        has_length = schema.get("minLength", 0) > 0 or is_short
        if len(given) + has_length > 1:
            beside = given[1] if len(given) > 1 else "maxLength" if "maxLength" in schema else "minLength"
            raise self._refusal(f"has {given[0]!r} beside {beside!r}, of which only one would be enforced", path)
        if has_length:  # as a pattern: by itself the library lets control characters through
            least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
            found["pattern"] = f"^[^\\n]{{{least},{'' if most is None else int(most)}}}$"
        elif "pattern" in schema:
            found["pattern"] = self._pattern(schema["pattern"], f"{path}.pattern")
        elif schema.get("format") in _FORMAT_PATTERNS:
            found["pattern"] = _FORMAT_PATTERNS[schema["format"]]
        elif "format" in schema:
            found["format"] = schema["format"]

    def _add_number(self, found: Schema, schema: Schema, is_integer: bool, path: str) -> None:
        bounds = {keyword: schema[keyword] for keyword in _BOUNDS if keyword in schema}
        if "multipleOf" in schema:
            if not is_integer or bounds or schema["multipleOf"] != int(schema["multipleOf"]):
                raise self._refusal(
                    "uses 'multipleOf', which the backend xgrammar enforces for integers without bounds alone", path
                )
            found["multipleOf"] = int(schema["multipleOf"])
        found.update(bounds)

    def _add_object(self, found: Schema, schema: Schema, path: str) -> None:
        required = list(dict.fromkeys(schema.get("required", ())))
        properties = {name: sub for name, sub in schema.get("properties", {}).items() if sub is not False}
        impossible = [name for name in required if schema.get("properties", {}).get(name) is False]
        if impossible:
            raise self._refusal(f"requires {impossible[0]!r}, which no value satisfies", path)
        properties |= {name: True for name in required if name not in properties}
        patterns, more = schema.get("patternProperties", {}), schema.get("additionalProperties")
        if patterns:
            if properties or len(patterns) > 1 or more is not False:
                raise self._refusal(
                    "uses 'patternProperties', which the backend xgrammar enforces alone: "
                    "one pattern beside additionalProperties false",
                    path,
                )
            self._add_pattern_properties(found, patterns, path)
        elif properties or "properties" in schema:
            if more not in (None, False):
                raise self._refusal(
                    "has 'additionalProperties' beside properties: the backend xgrammar would take escaped names", path
                )
            more = False
        found["additionalProperties"] = (
            False if more is False else self._schema(True if more is None else more, f"{path}.additionalProperties")
        )
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        if properties:
            where = f"{path}.properties"
            found["properties"] = {name: self._schema(sub, f"{where}.{name}") for name, sub in properties.items()}
            found["required"] = required
            if least <= len(required):
                least = 0
        elif least > 1:
            raise self._refusal("uses 'minProperties', which the backend xgrammar enforces for known names alone", path)
        if least:
            found["minProperties"] = least
        if most is not None:
            found["maxProperties"] = int(most)

    def _add_pattern_properties(self, found: Schema, patterns: Schema, path: str) -> None:
        ((pattern, sub),) = patterns.items()
        where = f"{path}.patternProperties"
        found["patternProperties"] = {self._pattern(pattern, where): self._schema(sub, f"{where}.{pattern}")}

    def _add_array(self, found: Schema, schema: Schema, path: str) -> None:
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(items, list):  # before 2020-12
            prefix, items = items, schema.get("additionalItems", True)
        if prefix:
            found["prefixItems"] = [self._schema(sub, f"{path}.prefixItems[{i}]") for i, sub in enumerate(prefix)]
        found["items"] = False if items is False else self._schema(items, f"{path}.items")
        for keyword in ("minItems", "maxItems"):
            if keyword in schema:
                found[keyword] = int(schema[keyword])

    def _pattern(self, pattern: str, path: str) -> str:
        return rewritten(pattern, f"{FIELD}: the pattern at {path}", within_json=True)

    # Unions

    def _are_distinct(self, branches: list[Any]) -> bool:
        """Whether no value satisfies two branches, by their types or by a constant that they require."""
        known = [self._target(branch) for branch in branches]
        return all(_exclude(one, other) for i, one in enumerate(known) for other in known[:i])

    def _target(self, schema: Any) -> Any:
        for _ in range(8):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._references.find(schema["$ref"])
        return schema

    def _refusal(self, what: str, path: str) -> InputError:
        return InputError(f"{FIELD}: the JSON schema at {path} {what}", FIELD)


def _exclude(one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if (mine := _values(one)) is not None and (theirs := _values(other)) is not None:
        return mine.isdisjoint(theirs)
    if _kinds(one).isdisjoint(_kinds(other)):
        return True
    if _kinds(one) != {"object"} or _kinds(other) != {"object"}:
        return False
    for name in set(one.get("required", ())) & set(other.get("required", ())):
        mine, theirs = (_values(each.get("properties", {}).get(name)) for each in (one, other))
        if mine is not None and theirs is not None and mine.isdisjoint(theirs):
            return True
    return False


def _values(schema: Any) -> set[str] | None:
    """JSON texts of the values that a schema lists; None if it lists none."""
    if not isinstance(schema, dict) or not ("const" in schema or "enum" in schema):
        return None
    return {json.dumps(value, sort_keys=True) for value in schema.get("enum", [schema.get("const")])}


def _kinds(schema: Schema) -> set[str]:
    if (values := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
        return {kind for value in values for kind in _TYPES if _is_of(value, kind)}
    kinds = schema.get("type", list(_TYPES))
    return {"number" if kind == "integer" else kind for kind in ([kinds] if isinstance(kinds, str) else kinds)}


def _is_of(value: Any, kinds: Any) -> bool:
    """Whether a JSON value has one of the types; None: of any."""
    if kinds is None:
        return True
    names = {kinds} if isinstance(kinds, str) else set(kinds)
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, int | float):
        return "number" in names or ("integer" in names and value == int(value))
    if value is None:
        return "null" in names
    return ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object") in names
