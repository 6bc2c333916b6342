"""A model held to a format's grammar writes calls that the format's parser reads, and that the tools accept."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from benchmarks.parsers import join, read
from quire.foundation.errors import InputError
from quire.parsers.base import TOOL_FORMATS
from quire.types.reply import Tool
from quire.types.structured import GrammarSpec

pytest.importorskip("llguidance")
from tests.frontend.parsers.random_walks import RandomWalks

FORMATS = list(TOOL_FORMATS)
WALKS = 3

TOOLS = [
    Tool(
        "get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["city", "days"],
        },
    ),
    Tool(
        "put",
        parameters={
            "type": "object",
            "properties": {
                "entry": {
                    "type": "object",
                    "properties": {
                        "is_new": {"type": "boolean"},
                        "sizes": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
                    },
                    "required": ["is_new", "sizes"],
                    "additionalProperties": False,
                },
                "kind": {"$ref": "#/$defs/Kind"},
            },
            "required": ["entry"],
            "additionalProperties": False,
            "$defs": {"Kind": {"type": "string", "enum": ["small", "very large"]}},
        },
    ),
    Tool("stop_all", parameters={"type": "object", "properties": {}, "additionalProperties": False}),
]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


def _markers(spec: GrammarSpec) -> list[str]:
    """What stands in angle brackets in a grammar."""
    return sorted(set(re.findall(r"<[^<> \"\\]+>", spec.text)))


@pytest.mark.parametrize("are_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_the_grammar_allows_are_calls_that_the_tools_accept(name: str, are_special: bool) -> None:
    form = TOOL_FORMATS.get(name)
    if are_special and not form.needs_special_tokens:
        return  # its markers are text
    walks = RandomWalks(_markers(form.constraint(TOOLS, required=False, parallel=True)), are_special=are_special)
    rng = random.Random(name)
    calls = 0
    for required in (True, False):
        for parallel in (True, False):
            spec = form.constraint(TOOLS, required=required, parallel=parallel)
            assert spec is not None
            assert spec.kind == "structural_tag"
            grammar = walks.compile(spec)
            for _ in range(WALKS):
                text = walks.draw(grammar, rng)
                if text is None:
                    continue  # a string went on and on
                found = join(read(form, TOOLS, [text]))
                names = [item[2] for item in found if item[0] == "start"]
                arguments = [json.loads(item[2]) for item in found if item[0] == "arguments"]
                assert sum(item[0] == "end" for item in found) == len(names) == len(arguments), text
                for called, values in zip(names, arguments, strict=True):
                    jsonschema.validate(values, SCHEMAS[called])
                if required:
                    assert names, text
                    assert not any(item[0] == "content" for item in found), text
                if not parallel:
                    assert len(names) <= 1, text
                calls += len(names)
    assert calls >= WALKS  # the walks came to their ends


@pytest.mark.parametrize("name", FORMATS)
def test_named_tool(name: str) -> None:
    """A choice by name is a requirement with one tool."""
    form = TOOL_FORMATS.get(name)
    walks = RandomWalks()
    spec = form.constraint(TOOLS[2:], required=True, parallel=False)
    text = walks.draw(walks.compile(spec), random.Random(0))
    assert text is not None
    found = join(read(form, TOOLS, [text]))
    assert [item[2] for item in found if item[0] == "start"] == ["stop_all"]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_a_schema_that_ties_arguments_together_has_no_grammar(name: str) -> None:
    """Where values are written one by one, a grammar could not hold it: the caller takes the list of calls."""
    tool = Tool("f", parameters={"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}]})
    assert TOOL_FORMATS.get(name).constraint([tool], required=True, parallel=True) is None


def test_bounds_of_bare_strings() -> None:
    form = TOOL_FORMATS.get("minimax_m2")
    schema = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{1,4}$"},
            "title": {"type": "string", "minLength": 3, "maxLength": 9},
        },
        "required": ["code", "title"],
    }
    tools = [Tool("f", parameters=schema)]
    walks = RandomWalks()
    grammar = walks.compile(form.constraint(tools, required=True, parallel=False))
    rng = random.Random(0)
    for _ in range(20):
        text = walks.draw(grammar, rng)
        assert text is not None
        found = join(read(form, tools, [text]))
        jsonschema.validate(json.loads(found[1][2]), schema)


@pytest.mark.parametrize("kind", ["email", "ipv4", "ipv6", "uuid", "date", "date-time"])
def test_formats_of_bare_strings(kind: str) -> None:
    form = TOOL_FORMATS.get("minimax_m2")
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": kind}}, "required": ["a"]}
    tools = [Tool("f", parameters=schema, strict=True)]
    walks = RandomWalks()
    grammar = walks.compile(form.constraint(tools, required=True, parallel=False))
    rng = random.Random(0)
    for _ in range(10):
        found = join(read(form, tools, [walks.draw(grammar, rng) or ""]))
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(found[1][2]), schema, format_checker=checker)


def test_a_pattern_that_could_write_the_end_of_a_value_has_no_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^.*$"}}}
    for name in ("minimax_m2", "gemma4", "minimax_m3", "glm45"):
        assert TOOL_FORMATS.get(name).constraint([Tool("f", parameters=schema)], required=True, parallel=True) is None


def test_what_cannot_be_enforced_is_refused_of_strict_tools_and_left_out_of_others() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form = TOOL_FORMATS.get("hermes")
    with pytest.raises(InputError, match=r"the function 'f'.*uniqueItems") as error:
        form.constraint([Tool("f", parameters=schema, strict=True)], required=True, parallel=True)
    assert error.value.param == "tools"
    RandomWalks().compile(form.constraint([Tool("f", parameters=schema)], required=True, parallel=True))
