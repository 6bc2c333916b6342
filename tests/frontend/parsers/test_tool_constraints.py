"""A model held to a format's grammar writes calls that the format's parser reads, and that the tools accept."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from benchmarks.parsers import join, read
from quire.frontend.parsers.base import TOOL_FORMATS
from quire.types.reply import Tool
from quire.types.structured import GrammarSpec

pytest.importorskip("xgrammar")
from tests.frontend.parsers.random_walks import RandomWalks

FORMATS = list(TOOL_FORMATS)
WALKS = 4

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


def _markers(spec: GrammarSpec) -> tuple[str, ...]:
    """What begins and ends the parts of a grammar."""
    found = re.findall(r'"(?:end|value)":"((?:[^"\\]|\\.)+)"|"triggers":\["((?:[^"\\]|\\.)+)"', spec.text)
    return tuple(sorted({json.loads(f'"{one or other}"') for one, other in found}))


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_grammar_allows_are_calls_that_the_tools_accept(name: str) -> None:
    form = TOOL_FORMATS.get(name)
    walks = RandomWalks(_markers(form.constraint(TOOLS, required=False, parallel=True)))
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
    walks = RandomWalks(())
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
    walks = RandomWalks(())
    grammar = walks.compile(form.constraint(tools, required=True, parallel=False))
    rng = random.Random(0)
    for _ in range(20):
        text = walks.draw(grammar, rng)
        assert text is not None
        found = join(read(form, tools, [text]))
        jsonschema.validate(json.loads(found[1][2]), schema)
