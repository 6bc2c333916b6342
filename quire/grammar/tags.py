"""Structural tags: text with parts that are bound, as a tree of formats in JSON. Read and checked here.

The formats are the common ones: const_string, json_schema, regex, grammar, any_text; sequence, or, optional, star,
plus, repeat; tag, triggered_tags, tags_with_separator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.foundation.errors import InputError
from quire.grammar.json_schema import normalize as json_schema
from quire.grammar.json_schema.json_text import json_text

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 64
MAX_FORMATS = 10_000
MAX_REPEAT = 10_000
Format = dict[str, Any]


def plain(tag: str | Mapping[str, Any], field: str) -> str:
    """The JSON text of the tag's format, its schemas in plain form; a plain text stays as it is.

    Takes the older form with `structures` as well.

    Raises InputError naming what is wrong and where.
    """
    return json_text(_Reader(field).read(tag), None, field, "the structural tag")


def text_of(tag: Any, field: str) -> str:
    """As it is, in whatever form. Raises InputError if it is no JSON or too long."""
    return json_text(tag, MAX_BYTES, field, "the structural tag")


class _Reader:
    def __init__(self, field: str) -> None:
        self._field = field
        self._num_formats = 0

    def read(self, tag: str | Mapping[str, Any]) -> Format:
        text = text_of(tag, self._field)
        try:
            tag = json.loads(text) if isinstance(tag, str) else tag
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self._field}: the structural tag is not valid JSON: {error}", self._field) from None
        if not isinstance(tag, Mapping):
            raise self._refusal("must be an object", "$")
        if "structures" in tag:
            return self._format(self._of_older_form(tag), "$", 0)
        if tag.get("type") == "structural_tag" or "format" in tag:
            return self._format(tag.get("format"), "$.format", 0)
        return self._format(tag, "$", 0)

    def _of_older_form(self, tag: Mapping[str, Any]) -> Format:
        structures = tag["structures"]
        if not isinstance(structures, list) or not all(isinstance(one, Mapping) for one in structures):
            raise self._refusal("must be a list of objects with begin, schema and end", "$.structures")
        tags = [
            {
                "type": "tag",
                "begin": one.get("begin"),
                "content": {"type": "json_schema", "json_schema": one.get("schema")},
                "end": one.get("end"),
            }
            for one in structures
        ]
        return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}

    def _format(self, given: Any, path: str, depth: int) -> Format:
        self._num_formats += 1
        if depth > MAX_DEPTH or self._num_formats > MAX_FORMATS:
            raise self._refusal(
                f"is nested too deeply (at most {MAX_DEPTH}) or has more than {MAX_FORMATS} parts", path
            )
        if not isinstance(given, Mapping):
            raise self._refusal("must be a format, an object with a type", path)
        kind = given.get("type")
        fields = _FIELDS.get(kind) if isinstance(kind, str) else None
        if fields is None:
            raise self._refusal(f"has the type {kind!r}; what is supported: {', '.join(_FIELDS)}", path)
        unknown = given.keys() - {"type", *fields}
        if unknown:
            raise self._refusal(f"of type {kind!r} has {min(unknown)!r}, which is not supported", path)
        found: Format = {"type": kind}
        for name, (is_required, read) in fields.items():
            if name in given:
                found[name] = read(self, given[name], f"{path}.{name}", depth + 1)
            elif is_required:
                raise self._refusal(f"of type {kind!r} needs {name!r}", path)
        if kind == "triggered_tags":
            self._check_triggers(found, path)
        return found

    def _check_triggers(self, found: Format, path: str) -> None:
        if not found["triggers"] or not all(found["triggers"]):
            raise self._refusal("must be a list of non-empty strings", f"{path}.triggers")
        for number, tag in enumerate(found["tags"]):
            if not any(tag["begin"].startswith(trigger) for trigger in found["triggers"]):
                raise self._refusal(f"begins with none of the triggers: {tag['begin']!r}", f"{path}.tags[{number}]")

    # Values of fields

    def _formats(self, value: Any, path: str, depth: int) -> list[Format]:
        if not isinstance(value, list) or not value:
            raise self._refusal("must be a list of formats, not empty", path)
        return [self._format(one, f"{path}[{i}]", depth) for i, one in enumerate(value)]

    def _tags(self, value: Any, path: str, depth: int) -> list[Format]:
        if isinstance(value, list):
            value = [{"type": "tag", **one} if isinstance(one, Mapping) else one for one in value]
        found = self._formats(value, path, depth)
        if any(one["type"] != "tag" for one in found):
            raise self._refusal("must be a list of tags", path)
        return found

    def _schema(self, value: Any, path: str, depth: int) -> Any:
        del depth
        if not isinstance(value, Mapping | bool):
            raise self._refusal("must be a JSON schema", path)
        schema = value if isinstance(value, bool) else dict(value)
        return json.loads(json_schema.plain(schema, self._field))

    def _text(self, value: Any, path: str, depth: int) -> str:
        del depth
        if not isinstance(value, str):
            raise self._refusal("must be a string", path)
        return value

    def _texts(self, value: Any, path: str, depth: int) -> list[str]:
        if not isinstance(value, list):
            raise self._refusal("must be a list of strings", path)
        return [self._text(one, f"{path}[{i}]", depth) for i, one in enumerate(value)]

    def _end(self, value: Any, path: str, depth: int) -> list[str]:
        return [value] if isinstance(value, str) else self._texts(value, path, depth)

    def _flag(self, value: Any, path: str, depth: int) -> bool:
        del depth
        if not isinstance(value, bool):
            raise self._refusal("must be true or false", path)
        return value

    def _count(self, value: Any, path: str, depth: int) -> int | None:
        del depth
        if value is None or (isinstance(value, int) and -1 <= value <= MAX_REPEAT and not isinstance(value, bool)):
            return value
        raise self._refusal(f"must be an integer in [-1, {MAX_REPEAT}]", path)

    def _style(self, value: Any, path: str, depth: int) -> str:
        del depth
        if value != "json":
            raise self._refusal(f"must be 'json', got {value!r}", path)
        return "json"

    def _refusal(self, what: str, path: str) -> InputError:
        return InputError(f"{self._field}: the structural tag at {path} {what}", self._field)


_Read = Callable[[_Reader, Any, str, int], Any]
_FIELDS: dict[str, dict[str, tuple[bool, _Read]]] = {  # of each type: whether it must be there, and how it is read
    "const_string": {"value": (True, _Reader._text)},
    "json_schema": {
        "json_schema": (True, _Reader._schema),
        "style": (False, _Reader._style),
        "max_whitespace_cnt": (False, _Reader._count),
    },
    "any_text": {"excludes": (False, _Reader._texts), "max_chars": (False, _Reader._count)},
    "regex": {"pattern": (True, _Reader._text)},
    "grammar": {"grammar": (True, _Reader._text)},
    "sequence": {"elements": (True, _Reader._formats)},
    "or": {"elements": (True, _Reader._formats)},
    "optional": {"content": (True, _Reader._format)},
    "star": {"content": (True, _Reader._format)},
    "plus": {"content": (True, _Reader._format)},
    "repeat": {
        "min": (True, _Reader._count),
        "max": (True, _Reader._count),
        "content": (True, _Reader._format),
    },
    "tag": {"begin": (True, _Reader._text), "content": (True, _Reader._format), "end": (True, _Reader._end)},
    "triggered_tags": {
        "triggers": (True, _Reader._texts),
        "tags": (True, _Reader._tags),
        "at_least_one": (False, _Reader._flag),
        "stop_after_first": (False, _Reader._flag),
        "excludes": (False, _Reader._texts),
    },
    "tags_with_separator": {
        "tags": (True, _Reader._tags),
        "separator": (True, _Reader._text),
        "at_least_one": (False, _Reader._flag),
        "stop_after_first": (False, _Reader._flag),
    },
}
