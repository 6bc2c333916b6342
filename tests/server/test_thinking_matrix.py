"""Thinking and what binds the answer, all together, through the official client: what is bound holds, reasoning stays
out of the content, nothing is empty, and a stream says what the whole reply says."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import jsonschema
import openai
import pytest

from tests.effort import sampled
from tests.server.process import ServerProcess, server_process
from tests.server.test_chat_replies import accumulated, seen
from tests.server.thinking_model import make_thinking_model

SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["calm", "wild"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["mood", "count"],
    "additionalProperties": False,
}
PATTERN = r"(yes|no), [a-z]{1,6}!"
TOOLS = [
    {"type": "function", "function": {"name": "look", "strict": True, "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "move",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"to": {"$ref": "#/$defs/place"}},
                "required": ["to"],
                "additionalProperties": False,
                "$defs": {"place": {"enum": ["up", "down"]}},
            },
        },
    },
]
NAMED = {"type": "function", "function": {"name": "move"}}
BOUND: dict[str, dict[str, Any]] = {
    "nothing": {},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "regex": {"extra_body": {"structured_outputs": {"regex": PATTERN}}},
    "auto": {"tools": TOOLS, "tool_choice": "auto"},
    "json_schema or auto": {
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": TOOLS, "tool_choice": NAMED},
}
THINKING: dict[str, dict[str, Any]] = {
    "on": {"chat_template_kwargs": {"enable_thinking": True}},
    "off": {"chat_template_kwargs": {"enable_thinking": False}},
    "absent": {},
}
BUDGET = 12
MODELS: dict[str, list[str]] = {  # besides demo, which is trained and begins the reasoning itself, or not
    "thinker": [],  # random weights, and a prompt that begins the reasoning
    "thinker without a format": ["--tool-call-parser", "none"],  # calls are a JSON list
}
EVERY = [
    *itertools.product(["thinker"], THINKING, BOUND, (1, 3)),
    *itertools.product(["thinker without a format"], THINKING, ("required", "named"), (1, 3)),
    *itertools.product(["demo"], THINKING, BOUND, (1,)),
]


def is_usual(case: tuple[str, str, str, int]) -> bool:
    """All that binds with thinking on, and each way to think with one of them."""
    model, thinking, bound, n = case
    return (thinking == "on" and n == 1) or bound == "required" or (model == "thinker" and n == 1)


CASES = sampled(EVERY, is_usual)


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, demo_server: ServerProcess
) -> Iterator[Callable[[str], openai.OpenAI]]:
    """Clients of the demo server and of those of MODELS, each started once."""
    with ExitStack() as running:

        @cache
        def start(name: str) -> openai.OpenAI:
            server = demo_server
            if name in MODELS:
                model = make_thinking_model(tmp_path_factory.mktemp("thinker"))
                options = ["--port", "0", "--device", "cpu", "--dtype", "float32", *MODELS[name]]
                server = running.enter_context(server_process("quire.cli.main", "serve", str(model), *options))
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            return running.enter_context(client)

        yield start


def check_arguments(name: str, arguments: str) -> None:
    schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == name)
    jsonschema.validate(json.loads(arguments), schema)


def check(choice: dict[str, Any], thinking: str, bound: str) -> None:
    content, calls = choice["content"], choice["calls"]
    for text in (content or "", choice["reasoning"] or ""):
        assert "<think>" not in text
        assert "</think>" not in text
    assert content or calls, f"an empty answer: {choice}"
    if thinking == "off":
        assert choice["reasoning"] is None
    if bound == "json_schema":
        jsonschema.validate(json.loads(content), SCHEMA)
    if bound == "json_schema or auto" and not calls:
        jsonschema.validate(json.loads(content), SCHEMA)
    if bound == "regex":
        assert re.fullmatch(PATTERN, content)
    if bound in ("required", "named"):
        assert calls
        assert content is None
        assert choice["finish"] == ("tool_calls" if bound == "required" else "stop")
    if bound == "named":
        assert [name for _, name, _ in calls] == ["move"]
    if choice["finish"] != "length":
        for _, name, arguments in calls:
            check_arguments(name, arguments)


@pytest.mark.parametrize(("model", "thinking", "bound", "n"), CASES)
def test_matrix(start: Callable[[str], openai.OpenAI], model: str, thinking: str, bound: str, n: int) -> None:
    client = start(model)
    is_bound = bound not in ("nothing", "auto")
    options: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Look around, then move up."}],
        "n": n,
        "seed": 7,
        "max_tokens": 200 if is_bound else 40,
        **BOUND[bound],
        # A random model writes any token now and then, markers too: it shall end its thinking by the budget only, and
        # what nothing binds it shall not end.
        "logit_bias": {"3": -100, "4": -100} | ({} if is_bound else {"2": -100}),
    }
    extra = {"thinking_token_budget": BUDGET, **THINKING[thinking], **options.pop("extra_body", {})}
    whole = client.chat.completions.create(**options, extra_body=extra)
    stream = client.chat.completions.create(
        **options, extra_body=extra, stream=True, stream_options={"include_usage": True}
    )
    choices = seen(whole)
    assert len(choices) == n
    for choice in choices:
        check(choice, thinking, bound)
    streamed = accumulated(stream)
    assert seen(streamed) == choices
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    details = whole.usage.completion_tokens_details
    assert streamed.usage.completion_tokens_details == details
    if thinking == "off":
        assert details is None
    elif details is not None:  # the demo thinks only if it is told to
        assert details.reasoning_tokens <= n * (BUDGET + 1)
