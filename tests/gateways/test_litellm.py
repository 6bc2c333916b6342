"""The official clients, LiteLLM's proxy, Quire: what is asked arrives, what is answered comes back, errors keep their
codes, and streams add up. Every route of the proxy that has a counterpart here is taken."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.gateways.conftest import Gateway

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Current weather in a city"}
TOOLS: list[Any] = [{"type": "function", "function": {**WEATHER, "parameters": CITY}}]
CLAUDE_TOOLS: list[Any] = [{**WEATHER, "input_schema": CITY}]
HI: list[Any] = [{"role": "user", "content": "Hello!"}]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
RESULT = json.dumps({"weather": "sunny", "temperature": 21})
GENERATING = ["hosted", "plain"]

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"messages": QUESTION, "tools": TOOLS},
    "required": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200},
    "thoughts": {"messages": QUESTION, "tools": TOOLS, "reasoning_effort": "high"},
    "schema": {"response_format": FORMAT, "max_tokens": 100},
    "stop": {"stop": ["quire"]},
    "n": {"n": 3, "temperature": 1.2, "seed": 3, "max_tokens": 20},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 4},
    "extensions": {"extra_body": {"top_k": 1, "structured_outputs": {"choice": ["perhaps"]}}},
    "length": {"max_tokens": 3},
}


@pytest.mark.parametrize("case", CHATS)
@pytest.mark.parametrize("model", GENERATING)
def test_chat(gateway: Gateway, model: str, case: str) -> None:
    if (model, case) == ("hosted", "n"):
        pytest.skip("with this provider the proxy ends a stream of several answers with the first of them")
    body = {"model": model, "messages": HI, "temperature": 0} | CHATS[case]
    whole = gateway.openai.chat.completions.create(**body)
    stream = gateway.openai.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    parts: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            add(parts.setdefault(choice.index, {"text": "", "thought": "", "calls": {}, "tokens": []}), choice)
    assert usage is not None
    assert whole.usage is not None
    if case != "n":  # with several answers the proxy counts by itself, with a tokenizer of its own
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )
    assert len(whole.choices) == body.get("n", 1)
    for choice in whole.choices:
        part, message = parts[choice.index], choice.message
        assert part["text"] == (message.content or "")
        assert part["thought"] == (getattr(message, "reasoning_content", None) or "")
        assert (
            list(part["calls"].values())
            == [
                [call.id, call.function.name, call.function.arguments]  # type: ignore[union-attr]
                for call in message.tool_calls or []
            ]
            or [call[1:] for call in part["calls"].values()]
            == [
                [call.function.name, call.function.arguments]  # type: ignore[union-attr]
                for call in message.tool_calls or []
            ]
        )
        entries = (choice.logprobs.content or []) if choice.logprobs else []
        assert part["tokens"] == [entry.token for entry in entries]
        if choice.index == 0:  # the proxy tells no other's
            assert part["finish"] == choice.finish_reason
    check(case, whole.choices[0])


def add(part: dict[str, Any], choice: Any) -> None:
    delta = choice.delta
    part["text"] += delta.content or ""
    part["thought"] += getattr(delta, "reasoning_content", None) or ""
    for call in delta.tool_calls or []:
        known = part["calls"].setdefault(call.index, ["", "", ""])
        known[0] = call.id or known[0]
        known[1] += call.function.name or ""
        known[2] += call.function.arguments or ""
    part["tokens"] += [entry.token for entry in (choice.logprobs.content or [])] if choice.logprobs else []
    part["finish"] = choice.finish_reason or part.get("finish")


def check(case: str, choice: Any) -> None:
    """That the fields had their effect."""
    message = choice.message
    if case in ("tools", "thoughts"):
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        assert choice.finish_reason == "tool_calls"
        assert bool(getattr(message, "reasoning_content", None)) == (case == "thoughts")
    elif case == "required":
        assert set(json.loads(message.tool_calls[0].function.arguments)) == {"city"}
    elif case == "schema":
        assert isinstance(json.loads(message.content)["a"], int)
    elif case == "stop":
        assert "quire" not in message.content
        assert choice.finish_reason == "stop"
    elif case == "logprobs":
        assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}
    elif case == "extensions":
        assert message.content == "perhaps"
    elif case == "length":
        assert choice.finish_reason == "length"


@pytest.mark.parametrize("options", [{}, {"echo": True, "logprobs": 1}, {"stop": ["Sun"]}], ids=json.dumps)
@pytest.mark.parametrize("model", GENERATING)
def test_completions(gateway: Gateway, model: str, options: dict[str, Any]) -> None:
    body = {"model": model, "prompt": "The quick", "temperature": 0, "max_tokens": 8} | options
    whole = gateway.openai.completions.create(**body).choices[0]
    texts, finish = [], None
    for chunk in gateway.openai.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts.append(choice.text or "")
            finish = choice.finish_reason or finish
    assert "".join(texts) == whole.text
    assert finish == whole.finish_reason
    assert whole.text.startswith("The quick") == ("echo" in options)
    if "logprobs" in options:
        assert whole.logprobs is not None
        assert "".join(whole.logprobs.tokens or []).startswith(whole.text)


def test_embeddings(gateway: Gateway) -> None:
    reply = gateway.openai.embeddings.create(model="embedder", input=["w1 w2", "w3"], encoding_format="float")
    assert [item.index for item in reply.data] == [0, 1]
    assert all(sum(x * x for x in item.embedding) == pytest.approx(1, abs=1e-3) for item in reply.data)
    packed = gateway.openai.embeddings.create(model="embedder", input=["w1 w2", "w3"])  # base64 on the wire
    for one, other in zip(reply.data, packed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="makes no vectors"):
        gateway.openai.embeddings.create(model="plain", input="w1")


@pytest.mark.parametrize("model", GENERATING)
def test_responses(gateway: Gateway, model: str) -> None:
    tools: list[Any] = [{"type": "function", **WEATHER, "parameters": CITY}]
    body: dict[str, Any] = {"model": model, "input": QUESTION, "tools": tools, "temperature": 0}
    whole = gateway.openai.responses.create(**body)
    with gateway.openai.responses.stream(**body) as stream:
        list(stream)
        streamed = stream.get_final_response()
    for reply in (whole, streamed):
        call = reply.output[-1]
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    output = {"type": "function_call_output", "call_id": whole.output[-1].call_id, "output": RESULT}  # type: ignore[union-attr]
    after = gateway.openai.responses.create(**body | {"input": [output], "previous_response_id": whole.id})
    assert after.output_text == "It is 21 degrees and sunny in Paris."


@pytest.mark.parametrize("model", [*GENERATING, "claude"])
def test_messages(gateway: Gateway, model: str) -> None:
    body: dict[str, Any] = {"model": model, "max_tokens": 300, "tools": CLAUDE_TOOLS, "messages": QUESTION}
    body["extra_body"] = {"temperature": 0}
    whole = gateway.claude.messages.create(**body)
    with gateway.claude.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        used = message.content[-1]
        assert used.type == "tool_use"
        assert (used.name, used.input, message.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    with gateway.claude.messages.stream(model=model, max_tokens=60, messages=HI) as hello:
        text = hello.get_final_text()
    assert "quire-demo" in text


LONG: list[Any] = [{"role": "user", "content": "word " * 5000}]
REFUSALS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "bad field": ("plain", {"extra_body": {"min_p": 7}}, 400, "min_p must be in"),
    "bad field, hosted": ("hosted", {"extra_body": {"min_p": 7}}, 400, "min_p must be in"),
    "too long": ("plain", {"messages": LONG}, 400, "ContextWindowExceededError"),
    "too long, hosted": ("hosted", {"messages": LONG}, 400, "ContextWindowExceededError"),
    "bad schema": ("plain", {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, 400, "schema"),
    "wrong key": ("wrong-key", {}, 401, "API key"),
    "wrong name": ("wrong-name", {}, 404, "nobody"),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_keep_their_status(gateway: Gateway, case: str, streams: bool) -> None:
    model, change, status, words = REFUSALS[case]
    with pytest.raises(openai.APIStatusError, match=words) as refused:
        gateway.openai.chat.completions.create(**{"model": model, "messages": HI, "stream": streams} | change)
    assert refused.value.status_code == status


def test_refusals_of_other_routes(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        gateway.openai.responses.create(model="plain", input="Hello!", temperature=9)
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        gateway.openai.completions.create(model="plain", prompt="Hello!", logprobs=99)
    for model in (*GENERATING, "claude"):
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            gateway.claude.messages.create(model=model, max_tokens=9, messages=HI, extra_body={"temperature": 9})
