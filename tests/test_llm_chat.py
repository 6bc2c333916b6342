"""Conversations offline: calls, reasoning and schemas, with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.foundation.errors import InputError

GREEDY = SamplingParams(temperature=0, max_tokens=80)
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip


def tool(name: str, description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": CITY}}


TOOLS = [tool("get_weather", "Weather of a city"), tool("get_time", "Local time in a city")]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", num_threads=1) as llm:
        yield llm


def test_a_call(llm: LLM) -> None:
    (output,) = llm.chat(WEATHER, GREEDY, use_tqdm=False, tools=TOOLS)
    answer = output.outputs[0]
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert answer.content == ""
    assert answer.finish_reason == "tool_calls"
    assert "get_weather" in answer.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=str)
def test_forced_calls_fit_their_schema(llm: LLM, choice: Any) -> None:
    params = SamplingParams(temperature=1.5, seed=1, n=4, max_tokens=120)
    (output,) = llm.chat(SUM, params, use_tqdm=False, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    finished = [answer for answer in output.outputs if answer.finish_reason != "length"]
    assert finished
    for answer in finished:
        (call,) = answer.tool_calls
        assert call.name in (["get_time"] if choice != "required" else ["get_weather", "get_time"])
        jsonschema.validate(json.loads(call.arguments), CITY)


def test_reasoning_is_told_apart(llm: LLM) -> None:
    thinks, does_not = (
        llm.chat(SUM, GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": on})[0].outputs[0]
        for on in (True, False)
    )
    assert thinks.reasoning
    assert thinks.content
    assert "think>" not in thinks.content + thinks.reasoning
    assert does_not.reasoning is None
    assert does_not.content == does_not.text


def test_a_schema_binds_the_content_alone_and_each_chat_its_own(llm: LLM) -> None:
    bound = SamplingParams(temperature=0, max_tokens=120, structured_outputs={"json": PERSON, "close_at_limit": True})
    outputs = llm.chat([SUM, SUM], [bound, GREEDY], use_tqdm=False, chat_template_kwargs={"enable_thinking": True},
                       max_thinking_tokens=20)  # fmt: skip
    first, second = (output.outputs[0] for output in outputs)
    assert first.reasoning
    jsonschema.validate(json.loads(first.content or ""), PERSON)
    assert "7" in (second.content or "")


@pytest.mark.parametrize(("options", "field"), [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"sampling_params": [GREEDY, GREEDY]}, "sampling_params"),
], ids=str)  # fmt: skip
def test_what_cannot_be(llm: LLM, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        llm.chat(WEATHER, use_tqdm=False, **options)
    assert error.value.param == field
