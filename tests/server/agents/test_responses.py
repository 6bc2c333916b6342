"""POST /v1/responses through the official client: events in order, and the same reply streamed and whole."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from tests.server.agents.conftest import MODEL
from tests.server.agents.dictated_llm import DictatedLLM, say
from tests.server.agents.scripts import FUNCTIONS, LOOK, SCRIPTS, THOUGHT
from tests.server.conftest import Served

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "description": f"To {name}.", "parameters": schema, "strict": False}
    for name, schema in FUNCTIONS.items()
]
IDS = ("id", "call_id", "item_id", "created_at", "completed_at")


def plain(value: Any) -> Any:
    """Without what differs from request to request."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in IDS}
    return [plain(item) for item in value] if isinstance(value, list) else value


def events_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    """Of a raw stream: every event is named after its type, and nothing follows the last."""
    response = served.client.post("/v1/responses", json={"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the deltas make, without looking at the events that repeat it."""
    output: list[dict[str, Any]] = []
    for event in events:
        item = output[event["output_index"]] if "item_id" in event else {}
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(output)
                assert event["item"]["status"] == "in_progress"
                output.append(event["item"])
            case "response.content_part.added":
                assert item["content"] == []
                item["content"].append(event["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
                if event.get("logprobs"):
                    item["content"][0]["logprobs"] += event["logprobs"]
            case "response.function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "response.custom_tool_call_input.delta":
                item["input"] += event["delta"]
            case "response.output_text.done" | "response.reasoning_text.done":
                assert item["content"][0]["text"] == event["text"]
            case "response.content_part.done":
                assert item["content"][0] == event["part"]
            case "response.function_call_arguments.done":
                assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
            case "response.output_item.done":
                output[event["output_index"]]["status"] = event["item"]["status"]
                assert output[event["output_index"]] == event["item"]
        if "item_id" in event:
            assert item["id"] == event["item_id"]
    return output


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("options", [{}, {"max_output_tokens": 60}, {"max_output_tokens": 15}], ids=str)
def test_streamed_and_whole(
    served: Served, oai: openai.OpenAI, llm: DictatedLLM, script: str, step: int, options: dict[str, Any]
) -> None:
    llm.step = step
    body = {"model": MODEL, "input": say(SCRIPTS[script]), "tools": TOOLS, **options}
    whole = oai.responses.create(**body).model_dump(mode="json", exclude_unset=True)
    events = events_of(served, **body)
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert plain(last["response"]) == plain(whole)
    assert added_up(events) == last["response"]["output"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {event["response"]["id"] for event in events if "response" in event} == {last["response"]["id"]}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_clients_own_accumulator(oai: openai.OpenAI, script: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": say(SCRIPTS[script]), "tools": TOOLS}
    whole = oai.responses.create(**body)
    with oai.responses.stream(**body) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == whole.output_text == final.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]


def test_the_events_of_one_answer(served: Served, llm: DictatedLLM) -> None:
    llm.step = 10_000
    events = events_of(served, input=say(f"{THOUGHT}Look:\n{LOOK}"), tools=TOOLS)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        *["function_call_arguments.delta"] * sum("function_call_arguments.delta" in e["type"] for e in events),
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]


def test_what_a_whole_reply_says(oai: openai.OpenAI) -> None:
    reply = oai.responses.create(
        model=MODEL,
        input=say("<think>hm</think>Hi"),
        instructions="Be brief.",
        metadata={"a": "b"},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=500,
        max_tool_calls=3,
        parallel_tool_calls=False,
        truncation="auto",
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        user="me",
        service_tier="flex",
    )
    assert (reply.object, reply.status, reply.model) == ("response", "completed", MODEL)
    assert (reply.instructions, reply.metadata, reply.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert (reply.top_p, reply.max_output_tokens, reply.max_tool_calls) == (0.9, 500, 3)
    assert (reply.parallel_tool_calls, reply.truncation, reply.user) == (False, "auto", "me")
    assert reply.reasoning is not None
    assert reply.reasoning.effort == "low"
    assert reply.text is not None
    assert reply.text.verbosity == "low"
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens == 7
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert reply.output_text == "Hi"
    assert abs(reply.created_at - time.time()) < 60


def test_incomplete(oai: openai.OpenAI) -> None:
    reply = oai.responses.create(model=MODEL, input=say("0123456789"), max_output_tokens=4)
    assert (reply.status, reply.output_text, reply.output[0].status) == ("incomplete", "0123", "incomplete")
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("step", [1, 5, 10_000])
def test_logprobs_are_those_of_the_content(served: Served, llm: DictatedLLM, step: int) -> None:
    llm.step = step
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": TOOLS}
    body["input"] = say(f"{THOUGHT}Four.\n{LOOK}")
    events = events_of(served, **body)
    message = events[-1]["response"]["output"][1]["content"][0]
    assert "".join(entry["token"] for entry in message["logprobs"]).strip() == message["text"].strip() == "Four."
    assert all(len(entry["top_logprobs"]) == 2 for entry in message["logprobs"])
    deltas = [e for event in events if event["type"] == "response.output_text.delta" for e in event["logprobs"]]
    assert deltas == message["logprobs"]
    whole = served.client.post("/v1/responses", json=body).json()
    assert whole["output"][1]["content"][0] == message


def test_a_custom_tool_takes_text(served: Served, llm: DictatedLLM) -> None:
    patch = "*** Begin Patch\n+ ünï\n*** End Patch"
    script = f'<tool_call>\n{{"name": "apply_patch", "arguments": {{"input": {json.dumps(patch)}}}}}\n</tool_call>'
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tool = {"type": "custom", "name": "apply_patch", "description": "Patch files.", "format": grammar}
    events = events_of(served, input=say(script), tools=[tool])
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert added_up(events) == [item]
    follow_up = [{"role": "user", "content": "Patch."}, item]
    follow_up.append({"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done " + say("ok")})
    reply = served.client.post("/v1/responses", json={"input": follow_up, "tools": [tool]}).json()
    assert reply["output"][0]["content"][0]["text"] == "ok"
    assert f"[call {item['call_id']} apply_patch" in llm.prompts[-1]


def test_functions_in_a_namespace(served: Served, llm: DictatedLLM) -> None:
    function = {"type": "function", "name": "read", "parameters": {"type": "object"}}
    tool = {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [function]}
    script = '<tool_call>\n{"name": "mcp__files__read", "arguments": {}}\n</tool_call>'
    reply = served.client.post("/v1/responses", json={"input": say(script), "tools": [tool]}).json()
    (item,) = reply["output"]
    assert (item["name"], item["namespace"]) == ("read", "mcp__files__")
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": say("read")}
    again = {"input": [{"role": "user", "content": "Read."}, item, output], "tools": [tool]}
    assert served.client.post("/v1/responses", json=again).json()["output"][0]["content"][0]["text"] == "read"
    assert "mcp__files__read" in llm.prompts[-1]


def test_sealed_reasoning_comes_back(oai: openai.OpenAI, llm: DictatedLLM) -> None:
    reply = oai.responses.create(
        model=MODEL, input=say("<think>a secret</think>Hi"), store=False, include=["reasoning.encrypted_content"]
    )
    reasoning = reply.output[0].model_dump(exclude={"content", "status"})
    assert reasoning["encrypted_content"]
    items: list[Any] = [{"role": "user", "content": "Hi"}, reasoning, reply.output[1].model_dump()]
    oai.responses.create(model=MODEL, input=[*items, {"role": "user", "content": say("x")}])
    assert "<think>a secret</think>Hi" in llm.prompts[-1]
    foreign = {**reasoning, "encrypted_content": "gAAAAABsomebodyelse"}
    oai.responses.create(model=MODEL, input=[items[0], foreign, items[2], {"role": "user", "content": say("x")}])
    assert "secret" not in llm.prompts[-1]


def test_counting(oai: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": say("Hi"), "tools": TOOLS, "instructions": "Be brief."}
    assert oai.responses.create(**body).usage.input_tokens == oai.responses.input_tokens.count(**body).input_tokens


def test_old_turns_go_when_the_context_is_full(oai: openai.OpenAI, llm: DictatedLLM) -> None:
    turns: list[Any] = [{"role": "system", "content": "SYSTEM"}]
    for i in range(30):
        turns += [{"role": "user", "content": f"question {i} " + "x" * 200}, {"role": "assistant", "content": "a"}]
    turns.append({"role": "user", "content": say("last")})
    with pytest.raises(openai.BadRequestError, match="context"):
        oai.responses.create(model=MODEL, input=turns, extra_body={"truncation": "disabled"})
    reply = oai.responses.create(model=MODEL, input=turns, truncation="auto", max_output_tokens=100)
    assert reply.output_text == "last"
    assert "SYSTEM" in llm.prompts[-1]
    assert "question 29" in llm.prompts[-1]
    assert "question 0 " not in llm.prompts[-1]
    assert 3800 < len(llm.prompts[-1]) + 100 <= 4096
