"""What a user asks of the form of an answer → one GrammarSpec, checked as far as takes no time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.foundation.aside import LONG
from quire.foundation.errors import InputError
from quire.foundation.shown import shown
from quire.frontend.text import check_text
from quire.grammar import tags
from quire.grammar.json_schema import normalize as json_schema
from quire.types.json_text import JsonText
from quire.types.structured import FIELD, RULES, Constraint, GrammarKind, GrammarSpec, StructuredOutputsParams

MAX_AT_DOOR = LONG  # characters of a schema or tag; a longer one is looked into where it is compiled, aside
MAX_TEXT = 64 * 1024  # characters of a regex or a grammar
MAX_CHOICES = 10_000
MAX_CHOICE_TEXT = 256 * 1024  # characters of all choices
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
GUIDED = {  # fields of older clients
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
    "guided_decoding_backend": "backend",
}
_OLDER_BACKENDS = {"outlines": "auto", "lm-format-enforcer": "auto"}


def constraint_of(params: StructuredOutputsParams | None) -> Constraint | None:
    """What binds an answer that is nothing but content. Raises InputError."""
    if params is None:
        return None
    return Constraint(grammar=grammar_of(params), close_at_limit=params.close_at_limit)


def grammar_of(params: StructuredOutputsParams, field: str = FIELD) -> GrammarSpec:
    """field: what the user calls it. Raises InputError naming what cannot be enforced, of a long schema not yet."""
    kind, text, is_plain = _read(params, field)
    whitespace = "none" if params.disable_any_whitespace else "bounded"
    if params.whitespace_pattern is not None:
        _check_string(params.whitespace_pattern, f"{field}.whitespace_pattern", field)
        whitespace = params.whitespace_pattern
    if kind in ("regex", "choice", "ebnf"):
        whitespace = "bounded"  # has none of its own
    return GrammarSpec(kind, text, params.backend, whitespace, is_plain)


def wished(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None = None,
    guided: Mapping[str, Any] | None = None,
) -> StructuredOutputsParams | None:
    """The one rule that the fields of a request give, with the options of all of them.

    guided: the older fields, by their names in GUIDED. Raises InputError naming the field.
    """
    fields = {
        name: str(value) if isinstance(value, JsonText) else value
        for name, value in (structured_outputs or {}).items()
        if value is not None
    }
    rules = [f"structured_outputs.{name}" for name in RULES if name in fields]
    for name, value in (guided or {}).items():
        if value is None or value is False:
            continue
        if name == "guided_decoding_backend":
            value = _older_backend(value)
        if GUIDED[name] in RULES:
            rules.append(name)
        fields.setdefault(GUIDED[name], value)
    asked = _of_response_format(response_format)
    if asked is not None:
        rules.append("response_format")
        fields = {**asked, **fields}
    if len(rules) > 1:
        raise InputError(f"only one of {', '.join(rules)} can bind an answer; give one", rules[1].partition(".")[0])
    if not rules:
        if fields:
            StructuredOutputsParams.of(fields)  # says what is missing
        return None
    return StructuredOutputsParams.of(fields)


def _of_response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if isinstance(schema, JsonText):
            return {"json": str(schema)}
        if not isinstance(schema, Mapping | bool):
            raise InputError(
                "response_format of type 'json_schema' needs "
                '{"json_schema": {"name": …, "schema": {…}}} with the schema as an object',
                "response_format",
            )
        return {"json": dict(schema) if isinstance(schema, Mapping) else json.dumps(schema)}
    if kind == "structural_tag":
        return {"structural_tag": dict(given)}
    raise InputError(f"response_format.type must be one of {', '.join(_FORMATS)}; got {shown(kind)}", "response_format")


def _read(params: StructuredOutputsParams, field: str) -> tuple[GrammarKind, str, bool]:
    """Kind and text of the grammar, and whether that is a schema or tag in plain form."""
    if params.json is not None:
        text, close_objects = json_schema.text_of(params.json, field), params.disable_additional_properties
        if len(text) > MAX_AT_DOOR and not close_objects:
            return "json_schema", text, False
        return "json_schema", json_schema.plain(text, field, close_objects=close_objects), True
    if params.json_object:
        return "json_object", "", False
    if params.regex is not None:
        return "regex", _check_string(params.regex, f"{field}.regex", field), False
    if params.choice is not None:
        return "choice", _choices(params.choice, field), False
    if params.grammar is not None:
        return "ebnf", _check_string(params.grammar, f"{field}.grammar", field), False
    assert params.structural_tag is not None
    text = tags.text_of(params.structural_tag, field)
    if len(text) > MAX_AT_DOOR:
        return "structural_tag", text, False
    return "structural_tag", tags.plain(text, field), True


def _choices(choices: list[str], field: str) -> str:
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise InputError(f"{field}.choice must be a list of non-empty strings", field)
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_CHOICE_TEXT:
        raise InputError(
            f"{field}.choice may hold at most {MAX_CHOICES} strings of {MAX_CHOICE_TEXT} characters in all", field
        )
    for choice in choices:
        check_text(choice, field)
    return json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False)


def _check_string(text: str, name: str, field: str) -> str:
    if not text:
        raise InputError(f"{name} must not be empty", field)
    if len(text) > MAX_TEXT:
        raise InputError(f"{name} may have at most {MAX_TEXT} characters, got {len(text)}", field)
    check_text(text, field)
    return text


def _older_backend(name: Any) -> Any:
    """ "outlines:no-fallback" and the like: what is not here any more leaves the choice to us."""
    plain = name.partition(":")[0] if isinstance(name, str) else name
    return _OLDER_BACKENDS.get(plain, plain)
