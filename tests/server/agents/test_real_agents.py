"""Responses and Messages on the real thing: `quire serve` with the demo model, asked by the official clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.agents.test_responses import plain
from tests.server.process import ServerProcess, wait_until

NAME = "demo"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city"}},
    "required": ["city"],
    "additionalProperties": False,
}
ABOUT = "Current weather in a city"
TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "description": ABOUT, "parameters": CITY}]
CLAUDE_TOOLS: list[Any] = [{"name": "get_weather", "description": ABOUT, "input_schema": CITY}]
QUESTION = "What is the weather in Paris?"
RESULT = json.dumps({"weather": "sunny", "temperature": 21})
ANSWER = "It is 21 degrees and sunny in Paris."


@pytest.fixture(scope="module")
def server(demo_server: ServerProcess) -> ServerProcess:
    return demo_server


@pytest.fixture(scope="module")
def oai(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("effort", ["none", "high"])
@pytest.mark.parametrize("stored", [True, False])
def test_a_tool_is_called_and_its_result_told(oai: openai.OpenAI, effort: Any, stored: bool) -> None:
    body: dict[str, Any] = {"model": NAME, "tools": TOOLS, "temperature": 0, "reasoning": {"effort": effort}}
    if not stored:
        body |= {"store": False, "include": ["reasoning.encrypted_content"]}
    with oai.responses.stream(input=QUESTION, **body) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        first = stream.get_final_response()
    *thoughts, call = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert "".join(deltas) == call.arguments
    assert len(thoughts) == (effort == "high")
    assert first.usage is not None
    assert (first.usage.output_tokens_details.reasoning_tokens > 0) == (effort == "high")
    output: dict[str, Any] = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    if stored:
        second = oai.responses.create(input=[output], previous_response_id=first.id, **body)
    else:
        history = [{"role": "user", "content": QUESTION}, *[item.to_dict() for item in first.output], output]
        second = oai.responses.create(input=history, **body)
    assert second.output_text == ANSWER


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}], ids=str)
def test_a_tool_is_used_and_its_result_told(claude: anthropic.Anthropic, thinking: Any) -> None:
    body: dict[str, Any] = {"model": NAME, "max_tokens": 400, "tools": CLAUDE_TOOLS, "thinking": thinking}
    body["extra_body"] = {"temperature": 0}
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    with claude.messages.stream(messages=turns, **body) as stream:
        first = stream.get_final_message()
    *thoughts, used = first.content
    assert used.type == "tool_use"
    assert (used.name, used.input, first.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    assert [block.type for block in thoughts] == ["thinking"] * (thinking["type"] == "enabled")
    result = {"type": "tool_result", "tool_use_id": used.id, "content": RESULT}
    turns += [first.to_param(), {"role": "user", "content": [result]}]
    second = claude.messages.create(messages=turns, **body)
    assert second.content[-1].to_dict()["text"] == ANSWER
    assert second.stop_reason == "end_turn"
    assert (second.usage.cache_read_input_tokens or 0) > 0


@pytest.mark.parametrize("seed", range(5))
def test_streamed_and_whole(oai: openai.OpenAI, seed: int) -> None:
    """Whatever a hot model makes of its markup."""
    body: dict[str, Any] = {"model": NAME, "input": QUESTION, "tools": TOOLS, "temperature": 1.4, "store": False}
    body |= {"reasoning": {"effort": "high"}, "max_output_tokens": 40 + 30 * (seed % 3), "extra_body": {"seed": seed}}
    body["include"] = ["message.output_text.logprobs"]
    whole = oai.responses.create(**body).to_dict()
    *_, last = oai.responses.create(**body, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    streamed = last.response.to_dict()
    for reply in (whole, streamed):
        del reply["usage"]["input_tokens_details"]  # type: ignore[attr-defined]
    assert plain(streamed) == plain(whole)


@pytest.mark.parametrize("seed", range(5))
def test_messages_streamed_and_whole(claude: anthropic.Anthropic, seed: int) -> None:
    body: dict[str, Any] = {"model": NAME, "max_tokens": 40 + 30 * (seed % 3), "tools": CLAUDE_TOOLS}
    body |= {"messages": [{"role": "user", "content": QUESTION}], "thinking": {"type": "adaptive"}}
    body |= {"extra_body": {"temperature": 1.4, "seed": seed}, "stop_sequences": ["er"]}
    whole = claude.messages.create(**body)
    with claude.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        message.id = message.usage = None  # type: ignore[assignment]
        for block in message.content:
            if block.type == "tool_use":
                block.id = ""
    assert streamed.to_dict() == whole.to_dict()


def test_logprobs(oai: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    reply = oai.responses.create(model=NAME, input="Hello!", temperature=0, include=include, top_logprobs=3)
    part = reply.output[0].content[0]  # type: ignore[union-attr]
    bound: Any = {"structured_outputs": {"regex": "[ab]{3}"}}
    short = oai.responses.create(model=NAME, input="Hello!", include=include, extra_body=bound)
    for made in (reply, short):
        entries = made.output[0].content[0].logprobs  # type: ignore[union-attr]
        assert "".join(entry.token for entry in entries) == made.output_text
    assert all(entry.top_logprobs[0].token == entry.token for entry in part.logprobs)  # type: ignore[union-attr]
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {3}  # type: ignore[union-attr]


def test_a_call_may_be_forced(oai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """Where the model would not have called by itself."""
    choices: list[Any] = ["required", {"type": "function", "name": "get_weather"}]
    for choice in choices:
        reply = oai.responses.create(
            model=NAME, input="Hello!", tools=TOOLS, tool_choice=choice, temperature=0, max_output_tokens=200
        )
        call = reply.output[0]
        assert call.type == "function_call"
        assert set(json.loads(call.arguments)) == {"city"}
    claude_choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "get_weather"}]
    for choice in claude_choices:
        message = claude.messages.create(
            model=NAME,
            max_tokens=200,
            messages=[{"role": "user", "content": "Hello!"}],
            tools=CLAUDE_TOOLS,
            tool_choice=choice,
            extra_body={"temperature": 0},
        )
        used = message.content[0]
        assert used.type == "tool_use"
        assert set(used.input) == {"city"}
        assert message.stop_reason == "tool_use"


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def test_background_and_cancelling(server: ServerProcess, oai: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": NAME, "input": "Tell me a story.", "background": True, "temperature": 0}
    reply = oai.responses.create(**body)
    events = list(oai.responses.retrieve(reply.id, stream=True))
    done = oai.responses.retrieve(reply.id)
    assert events[-1].type == "response.completed"
    assert done.status == "completed"
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == done.output_text
    endless = oai.responses.create(**body, extra_body={"ignore_eos": True}, max_output_tokens=1900)
    assert wait_until(lambda: oai.responses.retrieve(endless.id).status == "in_progress")
    assert oai.responses.cancel(endless.id).status == "cancelled"
    assert wait_until(lambda: metric(server, "vllm:num_requests_running") == 0)
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("effort", ["none", "high"])
def test_a_schema_binds_the_answer(oai: openai.OpenAI, claude: anthropic.Anthropic, effort: Any) -> None:
    """And nothing of the reasoning before it."""
    question = "Anna is 31 years old. Give name and age as JSON."
    body: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 300}
    reply = oai.responses.parse(input=question, text_format=Person, reasoning={"effort": effort}, **body)
    assert reply.output_parsed is not None
    assert reply.output_parsed == Person.model_validate_json(reply.output_text)
    with oai.responses.stream(input=question, text_format=Person, reasoning={"effort": effort}, **body) as stream:
        assert stream.get_final_response().output_parsed == reply.output_parsed
    message = claude.messages.parse(
        model=NAME,
        max_tokens=300,
        messages=[{"role": "user", "content": question}],
        output_format=Person,
        thinking={"type": "disabled" if effort == "none" else "adaptive"},
        extra_body={"temperature": 0},
    )
    assert message.parsed_output == reply.output_parsed
    assert len(message.content) == len(reply.output)


def test_other_things_that_bind_an_answer(server: ServerProcess) -> None:
    def ask(**body: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/responses", json={"input": "Hello!", "max_output_tokens": 100, **body})

    texts = [
        ask(structured_outputs={"regex": "[ab]{3}"}).json(),
        ask(input="Anna is 31 years old. Give name and age as JSON.", text={"format": {"type": "json_object"}}).json(),
    ]
    first, second = (reply["output"][-1]["content"][0]["text"] for reply in texts)
    assert re.fullmatch("[ab]{3}", first)
    assert isinstance(json.loads(second), dict)
    refused = ask(text={"format": {"type": "json_schema", "name": "x", "schema": {"contains": {}}}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text")
    body = {"model": NAME, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    body["output_config"] = {"format": {"type": "json_schema", "schema": {"contains": {}}}}
    refused = httpx.post(f"{server.url}/v1/messages", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("output_config")


def test_langchain(server: ServerProcess) -> None:
    """Its Responses mode: a tool, its result in a chain of responses, streams, and a schema."""
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        model=NAME,
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        use_responses_api=True,
        use_previous_response_id=True,
        max_retries=0,
    )
    tool = {"type": "function", "function": {"name": "get_weather", "description": ABOUT, "parameters": CITY}}
    first = model.bind_tools([tool]).invoke(QUESTION)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    turns = [("human", QUESTION), first, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]
    chunks = list(model.bind_tools([tool]).stream(turns))
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    parsed = model.with_structured_output(Person).invoke("Anna is 31 years old. Give name and age as JSON.")
    assert isinstance(parsed, Person)
