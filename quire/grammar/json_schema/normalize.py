"""JSON schemas at the door: what cannot be enforced is refused by name and path, the rest comes out in plain form.

In plain form a schema has no annotations and only keywords that bind; where a rarer keyword says the same as a common
one, the common one stands. Keywords and formats that JSON Schema does not know are annotations, as its specification
says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import count
from typing import Any

from quire.foundation.errors import InputError
from quire.grammar.json_schema.ecma import spelled_out
from quire.grammar.json_schema.endless import endless
from quire.grammar.json_schema.json_text import json_text
from quire.grammar.json_schema.references import NOTHING, References, pointer

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64  # of nested schemas
MAX_SCHEMAS = 10_000
MAX_OPTIONAL = 400  # properties of one object: each of them may come next, at every place
_ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable"),
    *("contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml", "x-guidance"),
    *("id", "$schema", "$vocabulary", "$comment"),
}
_REFUSED = {
    "not": "",
    "if": "",
    "then": "",
    "else": "",
    "contains": "",
    "minContains": "",
    "maxContains": "",
    "uniqueItems": "",
    "propertyNames": " but for a plain pattern or enum beside additionalProperties",
    "dependentRequired": "",
    "dependentSchemas": "",
    "dependencies": "",
    "unevaluatedProperties": " but for false in a schema that refers to no other",
    "unevaluatedItems": " but for false in a schema that refers to no other",
    "$dynamicRef": "",
    "$recursiveRef": "",
}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_REFERRING = ("$ref", "anyOf", "oneOf", "allOf")
MAX_HOSTNAME = 253  # characters (RFC 1034); what backends know of the format binds its labels alone
FORMATS = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
_LEAP = "(0[48]|[2468][048]|[13579][26])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY = r"(0[1-9]|1[0-9]|2[0-8])"
_DATE = (
    rf"({_YEAR}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    rf"|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMAT_PATTERNS = {  # RFC 3339, but no leap seconds, which few readers take; RFC 6901
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "json-pointer": "^(/([^/~]|~[01])*)*$",
}
_REFUSED_FORMATS = frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "regex"),
        "relative-json-pointer",
    )
)


def plain(
    schema: str | dict[str, Any] | bool, field: str, *, close_objects: bool = False, lenient: bool = False
) -> str:
    """The JSON text of the schema in plain form.

    field: what the user calls it. close_objects: objects that do not say so take no additional properties.
    lenient: keywords and formats that cannot be enforced are left out, where nobody was promised that they would be.
    Raises InputError naming the keyword and its path.
    """
    return json_text(_Reader(field, close_objects, lenient).read(schema), None, field, "the JSON schema")


def text_of(schema: Any, field: str) -> str:
    """As it is, in whatever form. Raises InputError if it is no JSON or too long."""
    return json_text(schema, MAX_BYTES, field, "the JSON schema")


class _Reader:
    def __init__(self, field: str, close_objects: bool, lenient: bool) -> None:
        self._field = field
        self._close_objects = close_objects
        self._lenient = lenient
        self._num_schemas = 0
        self._root: Any = None
        self._references = References(None)
        self._moved: dict[str, str] = {}  # references to places that are no keywords: the definitions they become
        self._names = (f"at{number}" for number in count())
        self._pending: list[str] = []  # of these, what is yet to be read

    def read(self, schema: str | dict[str, Any] | bool) -> dict[str, Any]:
        self._root = root = self._parsed(schema)
        self._references = References(root)
        if root is False:
            raise self._refusal("is false, which no value satisfies", "$")
        found: dict[str, Any] = {} if root is True else self._schema(root, "$", 0)
        self._add_targets(found)
        name = endless(found, References(found).find)
        if name is not None:
            raise self._refusal("needs itself, so that no finite value satisfies it", name)
        return found

    def _parsed(self, schema: str | dict[str, Any] | bool) -> Any:
        text = text_of(schema, self._field)
        try:
            found = json.loads(text, parse_constant=_no_constant) if isinstance(schema, str) else schema
        except RecursionError:
            raise self._refusal("is nested too deeply", "$") from None
        except ValueError as error:
            raise InputError(f"{self._field} is not valid JSON: {error}", self._field) from None
        if not isinstance(found, dict | bool):
            raise InputError(f"{self._field} must be a JSON schema, an object; got {_kind(found)}", self._field)
        return found

    # One schema

    def _schema(self, schema: Any, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._refusal(f"must be a schema, got {_kind(schema)}", path)
        self._num_schemas += 1
        if depth > MAX_DEPTH:
            raise self._refusal(f"is nested more than {MAX_DEPTH} levels deep", path)
        if self._num_schemas > MAX_SCHEMAS:
            raise self._refusal(f"holds more than {MAX_SCHEMAS} schemas", "$")
        schema = self._rewritten(schema)
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and len(properties) > MAX_OPTIONAL:
            num_optional = len(properties.keys() - set(required if _is_names(required) else ()))
            if num_optional > MAX_OPTIONAL:
                raise self._refusal(f"has {num_optional} optional properties, more than {MAX_OPTIONAL}", path)
        for keyword in sorted(_REFUSED.keys() & schema.keys()):
            if self._lenient:
                del schema[keyword]
                continue
            raise self._refusal(f"uses {keyword!r}, which is not supported{_REFUSED[keyword]}", path)
        found: dict[str, Any] = {}
        for keyword, value in schema.items():
            where = f"{path}.{keyword}"
            if keyword in _MAPS:
                found[keyword] = {
                    spelled_out(name) if keyword == "patternProperties" else name: self._schema(
                        sub, f"{where}.{name}", depth + 1
                    )
                    for name, sub in self._checked(value, dict, where).items()
                }
            elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
                subs = enumerate(self._checked(value, list, where))
                found[keyword] = [self._schema(sub, f"{where}[{i}]", depth + 1) for i, sub in subs]
            elif keyword in ("items", "additionalItems", "additionalProperties"):
                found[keyword] = self._schema(value, where, depth + 1)
            else:
                self._add_value(found, keyword, value, where)
        return found

    def _add_value(self, found: dict[str, Any], keyword: str, value: Any, where: str) -> None:
        """Check the value of a keyword and take it over, if it says something; what is not known is an annotation."""
        if keyword == "$ref":
            value = self._reference(value, where)
        elif keyword == "format":
            value = self._format(value, where)
            if value is None:
                return
        elif keyword == "$id" and where != "$.$id" and not str(value).startswith("#"):
            raise self._refusal("is not supported below the root", where)
        elif keyword in _CHECKS:
            if not _CHECKS[keyword](value):
                raise self._refusal(f"has a value that it cannot have: {json.dumps(value)[:60]}", where)
        elif keyword != "const":
            return
        found[keyword] = spelled_out(value) if keyword == "pattern" else value

    def _rewritten(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Without the keywords that others can stand for."""
        schema = dict(schema)
        if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
            schema.pop("uniqueItems", None)
        refers = any(keyword in schema for keyword in _REFERRING)
        for keyword, plainer in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "additionalItems" if isinstance(schema.get("items"), list) else "items"),
        ):
            if schema.get(keyword) is True or (schema.get(keyword) is False and plainer in schema):
                del schema[keyword]
            elif schema.get(keyword) is False and not refers:
                schema[plainer] = schema.pop(keyword)
        for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            is_of_draft_4 = isinstance(schema.get(keyword), bool)
            if is_of_draft_4 and schema.pop(keyword) and bound in schema:
                schema[keyword] = schema.pop(bound)
        if "propertyNames" in schema:
            self._rewrite_names(schema)
        if schema.get("format") == "hostname" and isinstance(schema.get("maxLength", 0), int | float):
            schema["maxLength"] = min(schema.get("maxLength", MAX_HOSTNAME), MAX_HOSTNAME)
        pattern = _FORMAT_PATTERNS.get(str(schema.get("format")))
        if pattern is not None:
            del schema["format"]
            if "pattern" in schema:
                schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
            else:
                schema["pattern"] = pattern
        is_object = schema.get("type") == "object" or "properties" in schema
        if self._close_objects and is_object:
            schema.setdefault("additionalProperties", False)
        return schema

    def _rewrite_names(self, schema: dict[str, Any]) -> None:
        """propertyNames of a map of values, as patternProperties."""
        names = schema["propertyNames"]
        if names is True or names == {}:
            del schema["propertyNames"]
            return
        if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
            return
        keywords = names.keys() - _ANNOTATIONS
        if names.get("type", "string") != "string":
            return
        if keywords <= {"pattern", "type"} and isinstance(names.get("pattern"), str):
            pattern = names["pattern"]
        elif keywords <= {"enum", "type"} and isinstance(names.get("enum"), list):
            pattern = f"^({'|'.join(_literal(name) for name in names['enum'] if isinstance(name, str))})$"
        else:
            return
        del schema["propertyNames"]
        schema["patternProperties"] = {pattern: schema.pop("additionalProperties", True)}
        schema["additionalProperties"] = False

    def _format(self, name: Any, where: str) -> str | None:
        if not isinstance(name, str):
            raise self._refusal(f"must be a string, got {_kind(name)}", where)
        if name in _REFUSED_FORMATS and not self._lenient:
            raise self._refusal(
                f"{name!r} is not supported (what is: {', '.join(sorted((*FORMATS, *_FORMAT_PATTERNS)))})", where
            )
        return name if name in FORMATS else None

    # References

    def _reference(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise self._refusal(f"must be a string, got {_kind(value)}", where)
        root_id = self._root.get("$id")
        reference = value
        if isinstance(root_id, str) and value.startswith(root_id.rstrip("#") + "#"):
            reference = value[len(root_id.rstrip("#")) :]
        if not reference.startswith("#"):
            raise self._refusal(f"refers to {value!r}: only references within the schema (#/…) are followed", where)
        self._target(reference, where)
        if reference == "#" or _is_read(reference):
            return reference
        if reference not in self._moved:
            taken = self._root.get("$defs", {})
            self._moved[reference] = next(name for name in self._names if name not in taken)
            self._pending.append(reference)
        return f"#/$defs/{self._moved[reference]}"

    def _target(self, reference: str, where: str) -> Any:
        found = self._references.find(reference)
        if found is NOTHING:
            raise self._refusal(f"refers to {reference!r}, which does not exist", where)
        return found

    def _add_targets(self, found: dict[str, Any]) -> None:
        """Schemas that are referred to but stand at places that are no keywords (components, say): as definitions."""
        while self._pending:
            reference = self._pending.pop()
            schema = self._schema(self._target(reference, reference), reference, 1)
            found.setdefault("$defs", {})[self._moved[reference]] = schema

    # Errors

    def _checked(self, value: Any, kind: type, where: str) -> Any:
        if not isinstance(value, kind):
            raise self._refusal(f"must be {'an object' if kind is dict else 'a list'}, got {_kind(value)}", where)
        return value

    def _refusal(self, what: str, path: str) -> InputError:
        return InputError(f"{self._field}: the JSON schema at {path} {what}", self._field)


def _is_read(reference: str) -> bool:
    """Whether a pointer leads through keywords alone, so that its target is read where it stands."""
    if not reference.startswith("#/"):
        return False
    keys = pointer(reference)
    for keyword in keys:
        if keyword in _LISTS or (keyword in _MAPS and keyword != "patternProperties"):
            if next(keys, None) is None:
                return False
        elif keyword not in ("items", "additionalItems", "additionalProperties"):
            return False
    return True


def _literal(text: str) -> str:
    """A regex for exactly this text."""
    return "".join(c if c.isalnum() else f"\\{c}" if c.isascii() and c.isprintable() and c != " " else c for c in text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _is_count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _is_number),
    "required": _is_names,
    "enum": lambda value: isinstance(value, list) and len(value) > 0,
    "pattern": lambda value: isinstance(value, str),
    "type": lambda value: isinstance(value, str) or (_is_names(value) and len(value) > 0),
}
