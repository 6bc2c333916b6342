"""POST /v1/messages through the official client: events in order, and the same message streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.agents.conftest import MODEL
from tests.server.agents.dictated_llm import DictatedLLM, say
from tests.server.agents.scripts import FUNCTIONS, LOOK, SCRIPTS, SUM, THOUGHT
from tests.server.conftest import Served, echo_server

TOOLS: list[Any] = [
    {"name": name, "description": f"To {name}.", "input_schema": schema} for name, schema in FUNCTIONS.items()
]
HI: list[Any] = [{"role": "user", "content": say("Hello")}]


def plain(message: Any) -> Any:
    """Without ids, which differ from request to request."""
    if isinstance(message, dict):
        return {key: plain(item) for key, item in message.items() if key != "id"}
    return [plain(item) for item in message] if isinstance(message, list) else message


def events_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "max_tokens": 1000, "messages": HI, "stream": True, **body}
    response = served.client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    events = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("max_tokens", [1000, 60, 15])
def test_streamed_and_whole(
    claude: anthropic.Anthropic, llm: DictatedLLM, script: str, step: int, max_tokens: int
) -> None:
    llm.step = step
    body: dict[str, Any] = {"model": MODEL, "max_tokens": max_tokens, "tools": TOOLS}
    body["messages"] = [{"role": "user", "content": say(SCRIPTS[script])}]
    whole = claude.messages.create(**body)
    with claude.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert plain(final.to_dict()) == plain(whole.to_dict())
    assert whole.content
    is_cut = len(SCRIPTS[script]) >= max_tokens
    calls = any(block.type == "tool_use" for block in whole.content)
    assert whole.stop_reason == ("max_tokens" if is_cut else "tool_use" if calls else "end_turn")


def test_the_events_of_one_answer(served: Served, llm: DictatedLLM) -> None:
    llm.step = 10_000
    content = say(f"{THOUGHT}Look:\n{LOOK}\n{SUM}")
    events = events_of(served, messages=[{"role": "user", "content": content}], tools=TOOLS)
    names = [event["type"] for event in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    blocks: dict[int, list[str]] = {}
    for event in events:
        if "index" in event:
            detail = event.get("content_block", event.get("delta", {})).get("type", "")
            blocks.setdefault(event["index"], []).append(f"{event['type']} {detail}".strip())
    assert {index: [names[0], names[-1]] for index, names in blocks.items()} == {
        0: ["content_block_start thinking", "content_block_stop"],
        1: ["content_block_start text", "content_block_stop"],
        2: ["content_block_start tool_use", "content_block_stop"],
        3: ["content_block_start tool_use", "content_block_stop"],
    }
    assert blocks[0][-2] == "content_block_delta signature_delta"
    started = events[0]["message"]
    assert (started["content"], started["stop_reason"]) == ([], None)
    assert started["usage"]["cache_read_input_tokens"] == 7
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None}
    assert events[-2]["usage"]["output_tokens"] > 0


def test_what_a_whole_message_says(claude: anthropic.Anthropic, llm: DictatedLLM) -> None:
    message = claude.messages.create(model=MODEL, max_tokens=50, messages=HI, metadata={"user_id": "me"})
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert message.id.startswith("msg_")
    assert message.usage.input_tokens + 7 == len(llm.prompts[-1])
    assert (message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens) == (7, 0)
    assert message.usage.output_tokens == len("Hello") + 1
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id is not None
    counted = claude.messages.count_tokens(model=MODEL, messages=HI)
    assert counted.input_tokens == len(llm.prompts[-1])


EMPTY: list[Any] = ["", [], [{"type": "text", "text": ""}]]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("content", EMPTY)
def test_turns_that_say_nothing(served: Served, path: str, content: Any) -> None:
    """A user's is refused: without it the turn before would be the last, and be continued. Never is it our mistake."""

    def status(*messages: dict[str, Any]) -> int:
        body = {"model": MODEL, "max_tokens": 5, "messages": [*messages]}
        return served.client.post(path, json=body).status_code

    hello, fine = {"role": "user", "content": say("Hello")}, {"role": "assistant", "content": "Fine"}
    assert status({"role": "user", "content": content}) == 400
    assert status(hello, fine, {"role": "user", "content": content}) == 400
    assert status({"role": "assistant", "content": content}) == 400
    assert status(hello, {"role": "assistant", "content": content}) == 200
    assert status(hello, {"role": "assistant", "content": content}, hello) == 200
    assert status({"role": "system", "content": content}, hello) == 200


def test_stop_sequences(claude: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": HI, "stop_sequences": ["zzz", "lo"]}
    whole = claude.messages.create(**body)
    with claude.messages.stream(**body) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "lo")
        assert message.content[0].to_dict()["text"] == "Hel"


def test_the_context_may_end_before_max_tokens(claude: anthropic.Anthropic, llm: DictatedLLM) -> None:
    llm.room = 3
    message = claude.messages.create(model=MODEL, max_tokens=50, messages=HI)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.content[0].to_dict()["text"] == "Hel"


def test_thinking_comes_back(claude: anthropic.Anthropic, llm: DictatedLLM) -> None:
    ask: list[Any] = [{"role": "user", "content": say(THOUGHT + LOOK)}]
    thinking: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}
    first = claude.messages.create(model=MODEL, max_tokens=2000, messages=ask, tools=TOOLS, thinking=thinking)
    thought, used = first.content
    assert thought.type == "thinking"
    assert used.type == "tool_use"
    assert (
        claude.messages.create(model=MODEL, max_tokens=2000, messages=ask, tools=TOOLS, thinking=thinking).content[0]
        == thought
    ), "the signature of the same thought is the same"
    assert llm.seen[-1]["constraint"].thinking.max_tokens == 1024
    result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": say("Done")}]}
    turns = [{"role": "user", "content": "Look"}, first.to_param(), {"role": "user", "content": [result]}]
    second = claude.messages.create(model=MODEL, max_tokens=2000, messages=turns, tools=TOOLS, thinking=thinking)
    assert second.content[0].to_dict()["text"] == "Done"
    assert f"<think>{thought.thinking}</think>" in llm.prompts[-1]
    assert f"[call {used.id} look " in llm.prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_omitted_thinking_is_in_the_signature(claude: anthropic.Anthropic, llm: DictatedLLM, stream: bool) -> None:
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "thinking": thinking}
    body["messages"] = [{"role": "user", "content": say(THOUGHT + "Yes")}]
    if stream:
        with claude.messages.stream(**body) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**body)
    thought = message.content[0]
    assert thought.type == "thinking"
    assert thought.thinking == ""
    turns = [{"role": "user", "content": "Hi"}, message.to_param(), *HI]
    claude.messages.create(**{**body, "messages": turns})
    assert "Let me see: 2 + 2." in llm.prompts[-1]


def test_turns_as_the_template_gets_them(claude: anthropic.Anthropic, llm: DictatedLLM) -> None:
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "You are kind.", "cache_control": {"type": "ephemeral"}},
    ]
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    turns: Any = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": [document, {"type": "text", "text": "Two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "whatever"},
                {"type": "text", "text": "Text"},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"q": 1}},
                {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": say("ok")},
                {"type": "tool_result", "tool_use_id": "t2", "content": "two", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t1"},
            ],
        },
    ]
    claude.messages.create(model=MODEL, max_tokens=9, system=system, messages=turns, tools=TOOLS)
    assert llm.prompts[-1] == (
        "[tools] look add\n[system] You are kind.\n[user] One\nT\nD\nTwo\n"
        '[assistant] Text[call t1 look {"q": 1}][call t2 look {}]\n'
        "[tool] Error: two\n[tool] \n[user] SAY:ok\n[assistant] "
    )


def test_an_answer_goes_on_where_the_assistant_stopped(claude: anthropic.Anthropic, llm: DictatedLLM) -> None:
    turns: Any = [*HI, {"role": "assistant", "content": "The answer is ("}]
    claude.messages.create(model=MODEL, max_tokens=9, messages=turns)
    assert llm.prompts[-1].endswith("[assistant] The answer is (")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any"}, ("required", True)),
        ({"type": "tool", "name": "add"}, ("add", True)),
        ({"type": "none"}, ("none", True)),
    ],
    ids=str,
)
def test_tool_choice(claude: anthropic.Anthropic, llm: DictatedLLM, choice: Any, expected: tuple[str, bool]) -> None:
    text = f"{LOOK}\n{SUM}"
    ask: list[Any] = [{"role": "user", "content": say(text)}]
    message = claude.messages.create(model=MODEL, max_tokens=900, messages=ask, tools=TOOLS, tool_choice=choice)
    used = [block.name for block in message.content if block.type == "tool_use"]
    constraint = llm.seen[-1]["constraint"]
    if expected[0] == "none":
        assert used == []
        assert message.content[0].to_dict()["text"] == text
    elif expected[0] == "auto":
        assert used == ["look"]
    else:
        assert constraint.grammar is not None, "the engine holds the model to a call"


def test_deferred_tools_are_shown_when_they_were_found(claude: anthropic.Anthropic, llm: DictatedLLM) -> None:
    tools: Any = [TOOLS[0], {**TOOLS[1], "defer_loading": True}, {"type": "web_search_20250305", "name": "web_search"}]
    claude.messages.create(model=MODEL, max_tokens=9, messages=HI, tools=tools)
    assert llm.prompts[-1].startswith("[tools] look\n")
    reference = {"type": "tool_reference", "tool_name": "add"}
    turns: Any = [
        {"role": "user", "content": "Find"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [reference]}]},
    ]
    claude.messages.create(model=MODEL, max_tokens=9, messages=turns, tools=tools)
    assert llm.prompts[-1].startswith("[tools] look add\n")


BAD: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages[0].content[0].type 'image'", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("server_tool_use", {"messages": [*HI, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]}),
    ("text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("t9", {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}]}),
    ("input", {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}),
    ("document", {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}),
    ("system", {"system": [{"type": "image"}]}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": "many"}),
    ("model", {"model": None}),
    ("temperature", {"temperature": 3}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -3}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("stop_sequences", {"stop_sequences": "x"}),
    ("tools[0].name", {"tools": [{"input_schema": {}}]}),
    ("tools[0].input_schema", {"tools": [{"name": "x"}]}),
    ("web_search_20250305", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "tool"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nope"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "maybe"}}),
    ("thinking", {"thinking": {"type": "sometimes"}}),
    ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
    ("output_config", {"output_config": {"effort": "huge"}}),
    ("output_config", {"output_config": {"format": {"type": "xml"}}}),
    ("mcp_servers", {"mcp_servers": [{"url": "x"}]}),
    ("container", {"container": "x"}),
]


@pytest.mark.parametrize(("named", "change"), BAD, ids=lambda x: json.dumps(x)[:60])
def test_bad_input(served: Served, named: str, change: dict[str, Any]) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": HI} | change
    response = served.client.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    refusal = response.json()
    assert refusal["type"] == "error"
    assert refusal["error"]["type"] == "invalid_request_error"
    assert named in refusal["error"]["message"]


def test_errors_have_anthropics_shape(served: Served, claude: anthropic.Anthropic, llm: DictatedLLM) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="no-such-model", max_tokens=9, messages=HI)
    assert unknown.value.type == "not_found_error"
    bad: httpx.Response = served.client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")
    wrong = served.client.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    llm.refuse_with = "queue_full"
    with pytest.raises(anthropic.APIStatusError) as full:
        claude.messages.create(model=MODEL, max_tokens=9, messages=HI)
    assert (full.value.status_code, full.value.type) == (529, "overloaded_error")
    assert full.value.response.headers["retry-after"]


def test_a_stream_that_breaks_off_says_so(claude: anthropic.Anthropic, llm: DictatedLLM) -> None:
    llm.breaks_after = 3
    with (
        pytest.raises(anthropic.APIStatusError) as broken,
        claude.messages.stream(model=MODEL, max_tokens=90, messages=HI) as stream,
    ):
        stream.get_final_message()
    assert broken.value.body == {
        "type": "error",
        "error": {"type": "api_error", "message": "internal error; the server's log has the details"},
    }


def test_keys_and_the_questions_clients_ask_first() -> None:
    with echo_server(DictatedLLM(served_model_name=[MODEL]), keys=("secret",)) as locked:
        with anthropic.Anthropic(base_url=locked.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                client.messages.create(model=MODEL, max_tokens=9, messages=HI)
            assert refused.value.type == "authentication_error"
        for options in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with anthropic.Anthropic(base_url=locked.url, max_retries=0, **options) as client:  # type: ignore[arg-type]
                assert client.messages.create(model=MODEL, max_tokens=9, messages=HI).content
        for method in ("HEAD", "OPTIONS"):
            assert locked.client.request(method, "/v1/messages", headers={"x-api-key": "secret"}).status_code == 200
        headers = {"x-api-key": "secret", "anthropic-version": "1999-01-01", "anthropic-beta": "a,b"}
        body = {"model": MODEL, "max_tokens": 9, "messages": HI}
        assert locked.client.post("/v1/messages?beta=true", json=body, headers=headers).status_code == 200
