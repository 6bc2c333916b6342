"""Keyword by keyword: what is accepted binds exactly, what cannot bind is refused by name."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from quire.foundation.errors import InputError
from quire.grammar.json_schema.normalize import MAX_OPTIONAL, plain
from quire.types.structured import GrammarSpec
from tests.grammar.walk import demo, takes

NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
BINDING: list[tuple[Any, list[Any], list[Any]]] = [  # schema, values of it, others
    ({"type": ["integer", "null"]}, [1, None], ["a", 1.5]),
    (True, [1, "a", {"b": [None]}], []),
    ({"type": "object", "properties": {"a": False}}, [{}], [{"a": 1}]),
    ({"enum": [1, "a", None, {"x": [1]}]}, [1, "a", None, {"x": [1]}], [2, "b"]),
    ({"const": {"a": None}}, [{"a": None}], [{"a": 2}]),
    ({"const": None}, [None], [1]),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 12}, [3, 11], [2, -5, 12, 100]),
    ({"type": "number", "exclusiveMinimum": 3, "maximum": 4.5}, [3.5, 4, 4.5], [3, 2, 4.6]),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    ({"type": "integer", "multipleOf": 5}, [10, 0, -5], [3, 11]),
    ({"type": "number", "multipleOf": 0.5}, [1.5, 2], [0.3]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é€", "abc"], ["a", "", "abcd"]),
    ({"type": "string", "pattern": "^a+b$"}, ["ab"], ["b", "xab"]),
    ({"type": "string", "pattern": "ab"}, ["ab", "xaby"], ["b"]),
    ({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}, ["ab"], ["a", "abcd", "A"]),
    ({"type": "string", "pattern": r"^\d{2}\w\s$"}, ["12a "], ["ab", "١٢a "]),
    ({"type": "string", "pattern": r"^\S.[\s\S]$"}, ["ab\n", "é\u3000 "], ["\xa0bc", "a\nb", "\ufeffbc", " ab"]),
    ({"const": "\x01é"}, ["\x01é"], ["é"]),
    ({"anyOf": [True, {"type": "string"}]}, [1, {"a": []}], []),
    ({"$ref": "#a", "$defs": {"x": {"enum": [{"$anchor": "a"}]}, "y": {"$anchor": "a", "const": 1}}}, [1], [None]),
    ({"type": "string", "pattern": '^"a\\\\$'}, ['"a\\'], ["a"]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2020-13-01"]),
    ({"type": "string", "format": "time"}, ["23:59:59Z", "00:00:00.5+01:30"], ["25:00:00Z", "12:00"]),
    ({"type": "string", "format": "date-time"}, ["2020-01-01T00:00:00Z"], ["2020-01-01", "2020-01-01T24:00:00Z"]),
    ({"type": "string", "format": "date", "pattern": "^19"}, ["1999-12-31"], ["2000-01-01", "19"]),
    ({"type": "string", "format": "email"}, ["a.b@c.de"], ["ab", "a@"]),
    (
        {"type": "string", "format": "hostname"},
        ["a", "a-1.b", ".".join(["a" * 63] * 3)],
        ["a..b", "-a", "a" * 64, ".".join(["a" * 63] * 4)],
    ),
    ({"type": "string", "format": "hostname", "maxLength": 3}, ["a.b"], ["a.bc", "a."]),
    ({"type": "string", "format": "ipv4"}, ["1.2.3.4"], ["1.2.3.456"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "fe80::a"], ["12345::"]),
    ({"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["1234"]),
    ({"type": "string", "format": "json-pointer"}, ["", "/a~1b/0"], ["a", "/~2"]),
    ({"type": "string", "format": "password"}, ["anything"], [1]),
    ({"type": "integer", "format": "int64"}, [7], ["7"]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        [[1], [1, 2]],
        [[], [1, 2, 3], ["a"]],
    ),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [[1], []], [[1, 2], ["a"]]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    ({"type": "array", "uniqueItems": False}, [[1, 1]], [1]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{"a": 1}, {}, {"b": "x"}], [{"a": "x"}]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}, [{"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    ({"type": "object", "required": ["z"]}, [{"z": 1}], [{}]),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"b": "x"}]),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, [{"x1": 1}, {"y": "s"}], [{"x1": "a"}]),
    ({"type": "object", "propertyNames": {"enum": ["a.b", "c"]}}, [{"a.b": 1}, {"c": 2}], [{"axb": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"a1": 1}], [{"b": 1}]),
    (
        {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
        [{"a": None}, {}],
        [{"a": None, "b": None}],
    ),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None]),
    (
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        [{"b": 1}],
        [{"a": 1}],
    ),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [4], [2, 6]),
    ({"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}]}, ["ab"], ["a", "b"]),
    ({"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 3}, [4], [2, "s"]),
    ({"$id": "http://x/y", "definitions": {"x y": {"const": 1}}, "$ref": "http://x/y#/definitions/x%20y"}, [1], [2]),
    (
        {"type": "object", "properties": {"a": {"$ref": "#/components/x"}}, "components": {"x": {"type": "integer"}}},
        [{"a": 1}],
        [{"a": "s"}],
    ),
    ({"x": [{"const": 1}], "anyOf": [{"$ref": "#/x/0"}]}, [1], [2]),
    (
        {"$defs": {"at0": {"const": 2}}, "x": {"const": 1}, "anyOf": [{"$ref": "#/x"}, {"$ref": "#/$defs/at0"}]},
        [1, 2],
        [3],
    ),
    (
        {"$defs": {"at0": {}}, "x": [{"const": 1}, {"const": 2}], "anyOf": [{"$ref": "#/x/0"}, {"$ref": "#/x/1"}]},
        [1, 2],
        [3],
    ),
    ({"properties": {"a": {"$ref": "#/default/x"}}, "default": {"x": {"type": "null"}}}, [{"a": None}], [{"a": 1}]),
    ({**NODE, "required": ["v", "n"]}, [{"v": 1, "n": {"v": 2, "n": None}}], [{"v": 1, "n": {"v": 1}}]),
    (
        {"type": "object", "properties": {"a": {"$ref": "#x"}}, "$defs": {"x": {"$anchor": "x", "const": 1}}},
        [{"a": 1}],
        [{"a": 2}],
    ),
    ({"title": "t", "default": 1, "x-y": 1, "$comment": "c", "type": "integer"}, [1], ["a"]),
    ({"type": "string", "enum": ["a", "b", 1]}, ["a"], ["c", 1]),
    ({"type": ["string", "integer"], "minLength": 2, "minimum": 5}, ["ab", 7], ["a", 3]),
    ({"x-guidance": {"lenient": True, "coerce_one_of": True}, "type": "integer"}, [1], ["a"]),
]
REFUSED: list[tuple[Any, str]] = [  # schema, what the message says
    ({"type": "object", "properties": {"a": {"not": {"type": "integer"}}}}, "$.properties.a uses 'not'"),
    ({"if": {"type": "integer"}, "then": {"minimum": 1}}, "'if'"),
    ({"type": "array", "contains": {"const": 1}}, "'contains'"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    ({"dependencies": {"a": ["b"]}}, "'dependencies'"),
    ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "'unevaluatedProperties'"),
    ({"$dynamicRef": "#n"}, "'$dynamicRef'"),
    ({"$ref": "http://json-schema.org/draft-07/schema#"}, "only references within"),
    ({"$ref": "#/$defs/nowhere"}, "does not exist"),
    ({"type": "array", "items": {"type": "string", "format": "iri"}}, "$.items.format 'iri' is not supported"),
    ({"minLength": -1}, "$.minLength"),
    ({"type": "object", "required": "a"}, "$.required"),
    ({"properties": []}, "$.properties must be an object"),
    ({"anyOf": {}}, "$.anyOf must be a list"),
    ({"items": 3}, "$.items must be a schema"),
    (False, "no value satisfies"),
    ({"$ref": "#"}, "at # needs itself"),
    ({"$ref": "#nowhere"}, "does not exist"),
    (
        {
            "anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}],
            "$defs": {"a": {"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#/$defs/a"}}}},
        },
        "at #/$defs/a needs itself",
    ),
    ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "needs itself"),
    ({"items": {"x": {"not": {}}}, "properties": {"a": {"$ref": "#/items/x"}}}, "#/items/x uses 'not'"),
    ({"items": {"x": [5]}, "properties": {"a": {"$ref": "#/items/x/0"}}}, "#/items/x/0 must be a schema"),
    ("{", "not valid JSON"),
    ("[1]", "must be a JSON schema"),
    ('{"minimum": NaN}', "not valid JSON"),
    ({"properties": {f"p{i}": {} for i in range(MAX_OPTIONAL + 1)}}, "optional properties"),
    ({"description": "x" * 300_000}, "longer than"),
    (json.loads('{"items":' * 100 + "{}" + "}" * 100), "levels deep"),
]
NOT_COMPILED: list[tuple[Any, str]] = [  # what only compiling shows
    ({"type": "string", "pattern": r"^(a)\1$"}, "backreferences"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "look-around"),
    ({"type": "string", "const": 1}, "nsatisfiable"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
]


@pytest.mark.parametrize(("schema", "values", "others"), BINDING, ids=lambda x: json.dumps(x, ensure_ascii=True)[:50])
def test_what_is_accepted_binds_exactly(schema: Any, values: list[Any], others: list[Any]) -> None:
    backend = demo()
    judge = jsonschema.Draft202012Validator({} if "x-guidance" in json.dumps(schema) else schema)
    grammar = backend.compile(GrammarSpec("json_schema", plain(schema, "json")))
    for value in values:
        assert "exclusiveMinimum" in str(schema) or judge.is_valid(value)
        assert takes(backend, grammar.matcher(), json.dumps(value, ensure_ascii=False)), value
    for value in others:
        assert not takes(backend, grammar.matcher(), json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_bind_is_refused_by_name_and_path(schema: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        plain(schema, "response_format")
    assert says in error.value.message
    assert error.value.param == "response_format"


@pytest.mark.parametrize(("schema", "says"), NOT_COMPILED, ids=lambda x: x if isinstance(x, str) else "")
def test_the_backend_refuses_the_rest(schema: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        demo().compile(GrammarSpec("json_schema", plain(schema, "json")))


@pytest.mark.parametrize(("schema", "values", "others"), BINDING, ids=lambda x: json.dumps(x, ensure_ascii=True)[:50])
def test_what_xgrammar_accepts_binds(schema: Any, values: list[Any], others: list[Any]) -> None:
    """It is stricter in some ways: fixed separators within constants, no further keys beside named ones."""
    backend = demo("xgrammar")
    try:
        grammar = backend.compile(GrammarSpec("json_schema", plain(schema, "json")))
    except InputError:
        return
    for value in others:
        assert not takes(backend, grammar.matcher(), json.dumps(value, ensure_ascii=False)), value
    texts = (json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values)
    assert any(takes(backend, grammar.matcher(), text) for text in texts)


XGRAMMAR_REFUSES: list[tuple[Any, str]] = [  # schema, what the message says
    ({"type": "string", "pattern": "^(?=a)b$"}, "$.pattern uses look-around"),
    ({"type": "string", "pattern": "a$b"}, "has an anchor within"),
    ({"type": "string", "pattern": '^a"$'}, "which JSON escapes"),
    ({"type": "string", "pattern": "^a+$", "minLength": 2}, "'pattern' beside 'minLength'"),
    ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
    ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": {}}}, "'$ref' beside 'minimum'"),
    ({"allOf": [{"minimum": 3}, {"maximum": 5}]}, "$.allOf has several parts"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf has branches"),
    ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, "'additionalProperties' beside properties"),
    ({"items": {"patternProperties": {"^a": {}}}}, "$.items uses 'patternProperties'"),
]


@pytest.mark.parametrize(("schema", "says"), XGRAMMAR_REFUSES, ids=lambda x: x if isinstance(x, str) else "")
def test_what_xgrammar_would_leave_out_is_refused(schema: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        demo("xgrammar").compile(GrammarSpec("json_schema", plain(schema, "json")))
    assert says in error.value.message


def test_strings_of_a_length_by_xgrammar_are_json() -> None:
    """By itself the library lets control characters through here."""
    backend = demo("xgrammar")
    grammar = backend.compile(GrammarSpec("json_schema", '{"type":"string","minLength":1,"maxLength":2}'))
    assert takes(backend, grammar.matcher(), '"a"')
    assert not takes(backend, grammar.matcher(), '"\x01"')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"\\u0061":"x"}'),
        ({"type": "object", "patternProperties": {"^é": {"type": "integer"}}}, '{"\\u00e9":"x"}'),
    ],
)
@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_no_key_passes_for_another(schema: Any, text: str, name: str) -> None:
    """Escapes would spell a key that the schema names."""
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    try:
        grammar = demo(name).compile(GrammarSpec("json_schema", plain(schema, "json")))
    except InputError:
        return
    assert not takes(demo(name), grammar.matcher(), text)


def test_plain_form_is_stable() -> None:
    for schema, *_ in BINDING:
        once = plain(schema, "json")
        assert plain(once, "json") == once


def test_lenient_leaves_out_what_cannot_bind() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "iri"}}
    assert plain(schema, "tools", lenient=True) == '{"type":"array","items":{"type":"string"}}'


def test_objects_may_be_closed() -> None:
    schema = {"type": "object", "properties": {"a": {"properties": {"b": {}}}}}
    closed = json.loads(plain(schema, "json", close_objects=True))
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
