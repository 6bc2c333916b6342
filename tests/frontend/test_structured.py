"""From the fields of a request to one grammar: one rule, all options, and a reason for what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.foundation.errors import InputError
from quire.frontend.structured import constraint_of, grammar_of, wished
from quire.types.sampling import SamplingParams
from quire.types.structured import GrammarSpec, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "title": "A"}}}
PLAIN = '{"type":"object","properties":{"a":{"type":"integer"}}}'


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object", "")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            GrammarSpec("json_schema", PLAIN, is_plain=True),
        ),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarSpec("json_schema", PLAIN, is_plain=True)),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            GrammarSpec("json_schema", PLAIN, "auto", "none", True),
        ),
        (
            {"structured_outputs": {"whitespace_pattern": " ?"}, "response_format": {"type": "json_object"}},
            GrammarSpec("json_object", "", "auto", " ?"),
        ),
        ({"structured_outputs": {"choice": ["b", "a", "b"]}}, GrammarSpec("choice", '["b", "a"]')),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, GrammarSpec("regex", "a+")),
        ({"guided": {"guided_grammar": "x", "guided_json": None}}, GrammarSpec("ebnf", "x")),
        (
            {"guided": {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar:no-fallback"}},
            GrammarSpec("json_schema", PLAIN, "xgrammar", is_plain=True),
        ),
        (
            {"guided": {"guided_regex": "x", "guided_decoding_backend": "guidance"}},
            GrammarSpec("regex", "x", "llguidance"),
        ),
        (
            {"guided": {"guided_json_object": True, "guided_whitespace_pattern": "\n"}},
            GrammarSpec("json_object", "", "auto", "\n"),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}},
            GrammarSpec("structural_tag", '{"type":"const_string","value":"x"}', is_plain=True),
        ),
        ({}, None),
    ],
)
def test_one_rule_with_its_options(fields: dict[str, Any], spec: GrammarSpec | None) -> None:
    fields = {"response_format": None, **fields}
    params = wished(**fields)
    assert (None if params is None else grammar_of(params)) == spec


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "xml"}}, "must be one of text, json_object"),
        ({"response_format": {}}, "must be one of"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "with the schema as an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}, "as an object"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "only one of"),
        ({"structured_outputs": {"regex": "a"}, "guided": {"guided_choice": ["a"]}}, "only one of"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "exactly one of"),
        ({"structured_outputs": {"rexeg": "a"}}, "unknown field 'rexeg'"),
        ({"structured_outputs": {"regex": 3}}, "regex"),
        ({"structured_outputs": {"json_object": False}}, "must be true"),
        ({"structured_outputs": {"regex": "a", "backend": "outlines"}}, "backend"),
        ({"structured_outputs": {"regex": ""}}, "must not be empty"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "at most 65536"),
        ({"structured_outputs": {"regex": "\ud800"}}, "surrogate"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "non-empty strings"),
        ({"structured_outputs": {"choice": [str(i) for i in range(10_001)]}}, "at most 10000"),
        ({"structured_outputs": {"json": {"a": "\ud800"}}}, "not valid JSON"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}}, "both"),
        ({"guided": {"guided_json": SCHEMA, "guided_decoding_backend": "mine"}}, "backend"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        grammar_of(wished(**{"response_format": None, **fields}))  # type: ignore[arg-type]
    assert says in error.value.message
    assert error.value.param


def test_objects_may_be_closed() -> None:
    params = StructuredOutputsParams(json=SCHEMA, disable_additional_properties=True)
    assert json.loads(grammar_of(params).text)["additionalProperties"] is False


def test_sampling_params_take_a_dict_or_params() -> None:
    given = StructuredOutputsParams(regex="a", close_at_limit=True)
    for params in (
        SamplingParams(structured_outputs=given),
        SamplingParams(structured_outputs={"regex": "a", "close_at_limit": True}),
    ):
        assert params.structured_outputs == given
        constraint = constraint_of(params.structured_outputs)
        assert constraint is not None
        assert constraint.close_at_limit
    with pytest.raises(InputError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="a")
    with pytest.raises(InputError, match="exactly one of"):
        StructuredOutputsParams()
