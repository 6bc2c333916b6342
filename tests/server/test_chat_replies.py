"""Reasoning and tool calls in chat replies: a stream adds up to the whole reply, through the official client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.server.conftest import Served, echo_server
from tests.server.scripted_llm import ScriptedLLM

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "time", "strict": True, "parameters": {"type": "object"}}},
]
CALLS = [("weather", {"city": 'Łódź {"}', "days": [1, 2]}), ("time", {})]
THOUGHT = "<think>\nThe user asks </thin for < the weather.\n</think>\n\n"
HERMES = "\n".join(
    "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>" for name, arguments in CALLS
)
CALL_LIST = json.dumps([{"name": name, "parameters": arguments} for name, arguments in CALLS])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3, "seed": 1},
    {"logprobs": True, "top_logprobs": 1},
    {"parallel_tool_calls": False},
    {"extra_body": {"include_reasoning": False}},
    {"extra_body": {"return_token_ids": True}},
]


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    with echo_server(ScriptedLLM("qwen3", "hermes")) as served:
        yield served


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with echo_server(ScriptedLLM()) as served:
        yield served


def ask(served: Served, script: str, **options: Any) -> tuple[Any, Any, list[Any]]:
    """The whole reply, what the stream adds up to, and the chunks."""
    options = {"model": "scripted", "messages": [{"role": "user", "content": script}]} | options
    options.setdefault("max_tokens", len(script.encode()))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**options)
        state, chunks = ChatCompletionStreamState(), []
        for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
            state.handle_chunk(chunk)
            chunks.append(chunk)
    return whole, state.get_final_completion() if options["max_tokens"] >= len(script.encode()) else None, chunks


def accumulated(stream: Iterable[Any]) -> Any:
    """What the official client makes of a stream; it does not care whether the end was a cut."""
    state = ChatCompletionStreamState()
    for chunk in stream:
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


def seen(reply: Any) -> list[dict[str, Any]]:
    """All that a client sees of the choices; ids of calls are random."""
    choices = []
    for choice in reply.choices:
        message = choice.message
        ids = [call.id for call in message.tool_calls or []]
        assert len(set(ids)) == len(ids)
        assert all(call_id.startswith("chatcmpl-tool-") for call_id in ids)
        choices.append(
            {
                "index": choice.index,
                "role": message.role,
                "content": message.content,
                "reasoning": getattr(message, "reasoning", None),
                "reasoning_content": getattr(message, "reasoning_content", None),
                "calls": [(c.type, c.function.name, c.function.arguments) for c in message.tool_calls or []],
                "finish": choice.finish_reason,
                "logprobs": choice.logprobs and [entry.to_dict() for entry in choice.logprobs.content],
            }
        )
    return choices


def assert_same(served: Served, script: str, **options: Any) -> dict[str, Any]:
    whole, streamed, chunks = ask(served, script, **options)
    assert seen(whole) == seen(streamed)
    assert whole.usage == streamed.usage
    for index in range(options.get("n", 1)):
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        named = [call.index for call in calls if call.id is not None]
        assert named == sorted(set(named)), "a call is named once, in order"
        assert [call.index for call in calls] == sorted(call.index for call in calls)
    first = seen(whole)[0]
    return first | {"usage": whole.usage.to_dict()}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: json.dumps(o)[:60])
@pytest.mark.parametrize(
    ("thought", "content", "calls"),
    list(itertools.product(["", THOUGHT], ["", "Let me look. 3 < 4 <tool"], ["", HERMES])),
)
def test_a_stream_adds_up_to_the_whole_reply(
    qwen: Served, options: dict[str, Any], thought: str, content: str, calls: str
) -> None:
    script = thought + content + ("\n" if content and calls else "") + calls
    if not script:
        return
    reply = assert_same(qwen, script, tools=TOOLS, **options)
    wants_reasoning = options.get("extra_body", {}).get("include_reasoning", True)
    reasoning = "The user asks </thin for < the weather." if thought and wants_reasoning else None
    assert (reply["reasoning"], reply["reasoning_content"]) == (reasoning, reasoning)
    assert reply["content"] == (content or None)
    expected = CALLS if options.get("parallel_tool_calls", True) else CALLS[:1]
    found = [(name, json.loads(arguments)) for _, name, arguments in reply["calls"]]
    assert found == (expected if calls else [])
    assert reply["finish"] == ("tool_calls" if calls else "stop")
    counted = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == options.get("n", 1) * len(thought.rstrip("\n"))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_of_a_model_without_a_format(plain: Served, choice: Any) -> None:
    reply = assert_same(plain, CALL_LIST, tools=TOOLS, tool_choice=choice)
    assert [(name, json.loads(arguments)) for _, name, arguments in reply["calls"]] == CALLS
    assert reply["content"] is None
    assert reply["finish"] == ("tool_calls" if choice == "required" else "stop")
    grammar = plain.llm.seen[-1]["constraint"].grammar
    assert grammar.kind == "json_schema"
    assert len(json.loads(grammar.text)["items"]["anyOf"]) == (2 if choice == "required" else 1)


@pytest.mark.parametrize("served", ["qwen", "plain"])
def test_text_stays_text_where_calls_are_not_wanted(served: str, request: pytest.FixtureRequest) -> None:
    server: Served = request.getfixturevalue(served)
    reply = assert_same(server, HERMES, tools=TOOLS, tool_choice="none")
    assert (reply["content"], reply["calls"], reply["finish"]) == (HERMES, [], "stop")


def test_without_tools_markup_is_text_and_thinking_is_still_split(qwen: Served) -> None:
    reply = assert_same(qwen, THOUGHT + HERMES)
    assert (reply["content"], reply["calls"]) == (HERMES, [])
    assert reply["reasoning"] == "The user asks </thin for < the weather."


def test_thinking_switched_off_gives_content_only(qwen: Served) -> None:
    for extra in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        reply = assert_same(qwen, "an answer", extra_body=extra)
        assert (reply["content"], reply["reasoning"]) == ("an answer", None)


@pytest.mark.parametrize("at", range(1, len(THOUGHT + HERMES) - 60, 7))
def test_what_max_tokens_cuts(qwen: Served, at: int) -> None:
    script = THOUGHT + HERMES
    whole, _, chunks = ask(qwen, script, tools=TOOLS, max_tokens=at)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    texts = {"content": "", "reasoning": "", "arguments": ""}
    for delta in (chunk.choices[0].delta for chunk in chunks if chunk.choices):
        texts["content"] += delta.content or ""
        texts["reasoning"] += getattr(delta, "reasoning", None) or ""
        texts["arguments"] += "".join(call.function.arguments for call in delta.tool_calls or [])
    message = choice.message
    assert texts["content"] == (message.content or "")
    assert texts["reasoning"] == (message.reasoning or "")
    assert texts["arguments"] == "".join(call.function.arguments for call in message.tool_calls or [])


def test_the_engine_is_told_what_binds_the_answer(qwen: Served) -> None:
    assert_same(qwen, "hello", extra_body={"thinking_token_budget": 7})
    thinking = qwen.llm.seen[-1]["constraint"].thinking
    assert (bytes(thinking.start), bytes(thinking.end)) == (b"<think>", b"</think>")
    assert (thinking.state, thinking.max_tokens) == ("maybe", 7)
    assert_same(qwen, "hello", extra_body={"thinking_token_budget": -1})
    assert qwen.llm.seen[-1]["constraint"] is None
    off = {"thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": False}}
    assert_same(qwen, "hello", extra_body=off)
    assert qwen.llm.seen[-1]["constraint"] is None


def test_an_answer_that_goes_on_inside_its_reasoning(qwen: Served) -> None:
    for begun, reasoning, content in (
        ("<think>\nHm,", "Hm,", None),  # it repeats what it goes on with: the marker again is no text
        ("<think>a</think>b", None, "<think>a</think>b"),
    ):
        whole, _, _ = ask(
            qwen,
            begun,
            messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}],
            extra_body={"continue_final_message": True},
        )
        message = whole.choices[0].message
        assert message.content == content
        assert message.reasoning == reasoning


def test_a_batch_of_conversations(qwen: Served) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("one", THOUGHT + "two", "three")]
    response = qwen.client.post("/v1/chat/completions/batch", json={"messages": conversations, "max_tokens": 200})
    reply = response.json()
    assert response.status_code == 200, reply
    messages = [choice["message"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert messages[0]["content"].startswith("one<|assistant|>one")
    assert messages[1]["content"].startswith("two<|assistant|><think>")
    assert messages[1]["reasoning"].startswith("The user")
    assert reply["usage"]["completion_tokens"] == 600


def test_templates_tools_and_variables_are_the_operators_unless_trusted(plain: Served) -> None:
    """What a server may be told about the prompt; the engine saw the prompt that was made."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    template = "{{ colour }} {{ tools is none }}"
    own = chat | {"chat_template": template}
    refused = plain.client.post("/v1/chat/completions", json=own)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template"
    options: dict[str, Any] = {"trust_request_chat_template": True}
    llm = ScriptedLLM()
    with echo_server(llm, exclude_tools_when_tool_choice_none=True, **options) as served:
        defaults = {"colour": "red", "thinking": True}
        llm.info.resolved.config.replies.default_chat_template_kwargs.update(defaults)
        for change, prompt in (
            ({}, "red True"),
            ({"chat_template_kwargs": {"colour": "blue"}}, "blue True"),
            ({"tools": TOOLS}, "red False"),
            ({"tools": TOOLS, "tool_choice": "none"}, "red True"),
            (
                {
                    "chat_template": "{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}",
                    "reasoning_effort": "none",
                },
                "none False False",
            ),
        ):
            reply = served.client.post("/v1/chat/completions", json=own | change)
            assert reply.status_code == 200, reply.text
            assert llm.seen[-1]["prompt"].text == prompt
    with echo_server(ScriptedLLM(tools="hermes"), enable_auto_tool_choice=False) as served:
        assert assert_same(served, HERMES, tools=TOOLS)["content"] == HERMES
        assert len(assert_same(served, HERMES, tools=TOOLS, tool_choice="required")["calls"]) == 2


def test_a_named_call_and_a_structure_exclude_each_other(plain: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "time"}},
        "structured_outputs": {"regex": "a"},
    }
    refused = plain.client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs")
