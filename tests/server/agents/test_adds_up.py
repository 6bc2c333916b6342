"""Every endpoint, every kind of content: what is streamed adds up to exactly the reply that is not streamed.

The demo model behind a real server, asked by the official clients; what has an accumulator of its own there uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.process import ServerProcess

NAME = "demo"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Current weather in a city"}
TOOLS = [{"type": "function", "function": {**WEATHER, "parameters": CITY}}]
RESPONSE_TOOLS = [{"type": "function", **WEATHER, "parameters": CITY}]
CLAUDE_TOOLS = [{**WEATHER, "input_schema": CITY}]
QUESTION = "What is the weather in Paris?"
ASK = [{"role": "user", "content": QUESTION}]
HI = [{"role": "user", "content": "Hello!"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
HOT: dict[str, Any] = {"temperature": 1.3, "seed": 7}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
# Of a reply, not of what was said
INCIDENTAL = {"id", "created", "created_at", "completed_at", "call_id", "object", "system_fingerprint", "signature"}
INCIDENTAL |= {"prompt_logprobs"}  # comes beside what is echoed, and never in a stream
INCIDENTAL |= {"cached_tokens", "cache_read_input_tokens", "input_tokens", "model", "encrypted_content"}


@pytest.fixture(scope="module")
def url(demo_server: ServerProcess) -> str:
    return demo_server.url


@pytest.fixture(scope="module")
def oai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


class Near(float):
    """Log-probabilities: by up to 1e-6 they depend on how much of the prompt the server had cached, and on who else is
    there."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) <= 1e-5

    __hash__ = float.__hash__


def essence(value: Any) -> Any:
    """Without what differs from request to request, and without what is empty."""
    if isinstance(value, float):
        return Near(value)
    if isinstance(value, dict):
        kept = {key: essence(item) for key, item in value.items() if key not in INCIDENTAL}
        return {key: item for key, item in kept.items() if item not in (None, "", [], {})}
    return [essence(item) for item in value] if isinstance(value, list) else value


def merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """What a delta adds: text to text, entries to lists, calls by their index; else the last word counts."""
    for key, value in part.items():
        if value is None:
            continue
        if key in ("tool_calls", "choices"):
            for item in value:
                name = "message" if key == "choices" and "delta" in item else None
                item = {**item, name: item["delta"]} if name else item
                item.pop("delta", None)
                merge(whole.setdefault(key, {}).setdefault(item["index"], {}), item)
        elif isinstance(value, dict):
            merge(whole.setdefault(key, {}), value)
        elif isinstance(value, str) and key in ("text", "content", "reasoning", "reasoning_content", "arguments"):
            whole[key] = whole.get(key, "") + value
        elif isinstance(value, list):
            whole.setdefault(key, []).extend(value)
        else:
            whole[key] = value


def added_up(chunks: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for chunk in chunks:
        merge(whole, {**chunk.to_dict(), "usage": None} if chunk.choices else {"usage": chunk.to_dict()["usage"]})
    choices = [whole["choices"][index] for index in sorted(whole["choices"])]
    for choice in choices:
        if calls := choice.get("message", {}).get("tool_calls"):
            choice["message"]["tool_calls"] = [
                {key: value for key, value in calls[index].items() if key != "index"} for index in sorted(calls)
            ]
    return {**whole, "choices": choices}


COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {},
    "n": {"n": 3, **HOT},
    "prompts": {"prompt": ["The quick", "Hello"], "n": 2, **HOT},
    "ids": {"prompt": [72, 105, 300]},
    "echo": {"echo": True, **HOT},
    "echo, n": {"echo": True, "n": 2, **HOT},
    "echo, log-probabilities": {"echo": True, "logprobs": 2},
    "echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "log-probabilities": {"logprobs": 2, **HOT},
    "stop": {"stop": ["Sun", "u"]},
    "stop kept": {"stop": ["from the"], "extra_body": {"include_stop_str_in_output": True}},
    "stop, log-probabilities": {"stop": ["Sun"], "logprobs": 1},
    "schema": {"extra_body": {"response_format": FORMAT}},
    "token ids": {"extra_body": {"return_token_ids": True}, "n": 2, **HOT},
    "prompt at the end": {"max_tokens": 1},
}


@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions(oai: openai.OpenAI, case: str) -> None:
    body: dict[str, Any] = {"model": NAME, "prompt": "The quick", "max_tokens": 20, "temperature": 0}
    body |= COMPLETIONS[case]
    whole = oai.completions.create(**body).to_dict()
    streamed = added_up(oai.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert essence(streamed) == essence(whole)


CHATS: dict[str, dict[str, Any]] = {
    "text": {},
    "n": {"n": 3, **HOT},
    "thoughts": {"extra_body": THINK},
    "thoughts hidden": {"extra_body": THINK | {"include_reasoning": False}},
    "thoughts, budget": {"extra_body": THINK | {"thinking_token_budget": 3}},
    "call": {"messages": ASK, "tools": TOOLS},
    "thoughts, call": {"messages": ASK, "tools": TOOLS, "extra_body": THINK},
    "thoughts, call, n": {"messages": ASK, "tools": TOOLS, "extra_body": THINK, "n": 2, **HOT},
    "call cut": {"messages": ASK, "tools": TOOLS, "max_tokens": 12},
    "thoughts cut": {"messages": ASK, "tools": TOOLS, "extra_body": THINK, "max_tokens": 6},
    "call forced": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200},
    "call named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "schema": {"response_format": FORMAT},
    "schema, thoughts": {"response_format": FORMAT, "extra_body": THINK},
    "schema or call": {"messages": ASK, "tools": TOOLS, "response_format": FORMAT},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "log-probabilities, call, thoughts": {"messages": ASK, "tools": TOOLS, "extra_body": THINK, "logprobs": True},
    "log-probabilities, n": {"logprobs": True, "n": 2, **HOT},
    "stop": {"stop": ["quire"]},
    "stop in a call": {"messages": ASK, "tools": TOOLS, "stop": ["Par"]},
    "stop kept": {"stop": ["quire"], "extra_body": {"include_stop_str_in_output": True}},
    "length": {"max_tokens": 3},
    "token ids": {"extra_body": {"return_token_ids": True, "return_prompt_text": True}},
    "echo": {
        "messages": [*HI, {"role": "assistant", "content": "Hello! I"}],
        "extra_body": {"continue_final_message": True, "echo": True},
    },
}


@pytest.mark.parametrize("case", CHATS)
def test_chat(oai: openai.OpenAI, case: str) -> None:
    body: dict[str, Any] = {"model": NAME, "messages": HI, "max_tokens": 40, "temperature": 0} | CHATS[case]
    whole = oai.chat.completions.create(**body).to_dict()
    options = {"include_usage": True, "continuous_usage_stats": len(case) % 2 == 0}
    streamed = added_up(oai.chat.completions.create(**body, stream=True, stream_options=options))
    for told in ("prompt_token_ids", "prompt_text"):
        assert (told in whole) is ("return_token_ids" in body.get("extra_body", {}))
    assert essence(streamed) == essence(whole)


RESPONSES: dict[str, dict[str, Any]] = {
    "text": {},
    "hot": {"temperature": 1.3, "extra_body": {"seed": 3}},
    "thoughts": {"reasoning": {"effort": "high"}},
    "call": {"input": QUESTION, "tools": RESPONSE_TOOLS},
    "thoughts, call": {"input": QUESTION, "tools": RESPONSE_TOOLS, "reasoning": {"effort": "high"}},
    "call cut": {"input": QUESTION, "tools": RESPONSE_TOOLS, "max_output_tokens": 16},
    "call forced": {"tools": RESPONSE_TOOLS, "tool_choice": "required"},
    "schema": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "log-probabilities": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "stop": {"extra_body": {"stop": ["quire"]}},
    "length": {"max_output_tokens": 3},
}


@pytest.mark.parametrize("case", RESPONSES)
def test_responses(oai: openai.OpenAI, case: str) -> None:
    body: dict[str, Any] = {"model": NAME, "input": "Hello!", "temperature": 0, "store": False, "max_output_tokens": 40}
    body |= RESPONSES[case]
    whole = oai.responses.create(**body).to_dict()
    events = list(oai.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert essence(events[-1].response.to_dict()) == essence(whole)  # type: ignore[union-attr]
    assert [essence(said) for said in said_in(events)] == [essence(item) for item in whole["output"]]  # type: ignore[attr-defined]


def said_in(events: list[Any]) -> list[dict[str, Any]]:
    """The items as their own deltas make them."""
    items: list[dict[str, Any]] = []
    for event in events:
        if event.type == "response.output_item.added":
            items.append({**event.item.to_dict(), "content": []})
        elif event.type == "response.content_part.added":
            items[-1]["content"].append(event.part.to_dict())
        elif event.type in ("response.output_text.delta", "response.reasoning_text.delta"):
            part = items[-1]["content"][-1]
            part["text"] = part.get("text", "") + event.delta
            if logprobs := getattr(event, "logprobs", None):
                part.setdefault("logprobs", []).extend(entry.to_dict() for entry in logprobs)
        elif event.type == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event.delta
        elif event.type == "response.output_item.done":
            items[-1]["status"] = event.item.to_dict().get("status")
    return items


MESSAGES: dict[str, dict[str, Any]] = {
    "text": {},
    "hot": {"extra_body": {"temperature": 1.3, "seed": 3}},
    "thoughts": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "call": {"messages": ASK, "tools": CLAUDE_TOOLS},
    "thoughts, call": {"messages": ASK, "tools": CLAUDE_TOOLS, "thinking": {"type": "adaptive"}},
    "call cut": {"messages": ASK, "tools": CLAUDE_TOOLS, "max_tokens": 16},
    "call forced": {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "any"}},
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "stop": {"stop_sequences": ["quire"]},
    "length": {"max_tokens": 3},
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(claude: anthropic.Anthropic, case: str) -> None:
    body: dict[str, Any] = {"model": NAME, "messages": HI, "max_tokens": 40, "extra_body": {"temperature": 0}}
    body |= MESSAGES[case]
    whole = claude.messages.create(**body)
    with claude.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    assert essence(streamed.to_dict()) == essence(whole.to_dict())
