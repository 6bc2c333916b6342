"""Whole sessions of coding agents, turn by turn, in the shapes that they send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.agents.agent_bodies import (
    EVERYTHING,
    RULES,
    as_codex_replays,
    claude_code,
    claude_title,
    codex,
    codex_with_rules,
)
from tests.server.agents.conftest import MODEL
from tests.server.agents.dictated_llm import DictatedLLM, say
from tests.server.agents.scripts import call
from tests.server.conftest import Served, echo_server

BETA = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", "anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def large() -> Iterator[Served]:
    with echo_server(DictatedLLM(context=100_000, served_model_name=[MODEL])) as served:
        yield served


def test_a_session_of_codex(large: Served) -> None:
    """It looks, patches, asks a tool of a namespace, and says that it is done; nothing is stored."""
    patch = "*** Begin Patch\n*** Update File: a.py\n+x = 1\n*** End Patch"
    said = [
        f"<think>Look first.</think>I will look.\n{call('exec_command', cmd='ls -la', timeout_ms=1000)}\n"
        + call("update_plan", plan=[{"step": "look", "status": "in_progress"}]),
        f"<think>Now patch.</think>{call('apply_patch', input=patch)}",
        call("mcp__docs__read_page", cmd="x"),
        "<think>All done.</think>Done: **a.py** is patched.",
    ]
    kinds = [
        ["reasoning", "message", "function_call", "function_call"],
        ["reasoning", "custom_tool_call"],
        ["function_call"],
        ["reasoning", "message"],
    ]
    with openai.OpenAI(base_url=f"{large.url}/v1", api_key="none", max_retries=0) as client:
        items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": say(said[0])}]
        for turn, wanted in enumerate(kinds):
            body = codex(items)
            extra = {"client_metadata": body.pop("client_metadata")}
            del body["stream"]
            with client.responses.stream(model=MODEL, **body, extra_body=extra) as stream:
                done = [event.item.to_dict() for event in stream if event.type == "response.output_item.done"]
                final = stream.get_final_response()
            assert [item["type"] for item in done] == wanted
            assert [item.to_dict()["id"] for item in final.output] == [item["id"] for item in done]
            items += map(as_codex_replays, done)
            for i, item in enumerate(done):
                if "call_id" in item:
                    output = say(said[turn + 1]) if i + 1 == len(done) else "ok"
                    items.append({"type": f"{item['type']}_output", "call_id": item["call_id"], "output": output})
        prompt = large.llm.prompts[-1]  # type: ignore[attr-defined]
        assert prompt.startswith("[medium][tools] exec_command update_plan apply_patch mcp__docs__read_page\n[system] ")
        assert "<think>Look first.</think>I will look.[call" in prompt, "thoughts came back sealed"
        assert prompt.count("[call ") == 4
        assert prompt.count("[tool] ") == 4


def test_a_session_of_claude_code(large: Served) -> None:
    """Parallel calls, results with cache marks and reminders, a late system message, and counting on the way."""
    said = [
        f"<think>Look first.</think>I will look.\n{call('Bash', cmd='ls')}\n{call('Read', cmd='a.py')}",
        f"<think>Edit.</think>{call('Edit', cmd='x')}",
        "<think>Done.</think>It is done.",
    ]
    reminder = {"type": "text", "text": "<system-reminder>\nBe careful.\n</system-reminder>"}
    first = {"type": "text", "text": say(said[0]), "cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [reminder, first]}]
    with anthropic.Anthropic(base_url=large.url, api_key="none", max_retries=0, default_headers=BETA) as client:
        for turn in range(3):
            body = claude_code(messages)
            context = body.pop("context_management")
            del body["stream"]
            with client.messages.stream(model=MODEL, **body, extra_body={"context_management": context}) as stream:
                message = stream.get_final_message()
            assert message.stop_reason == ("tool_use" if turn < 2 else "end_turn")
            assert message.content[0].type == "thinking"
            fields = {key: body[key] for key in ("messages", "system", "tools", "thinking")}
            counted = client.messages.count_tokens(model=MODEL, **fields)
            assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
            messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
            used = [block for block in message.content if block.type == "tool_use"]
            results: list[dict[str, Any]] = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "ok"}]}
                for block in used
            ]
            if results:
                results[-1] |= {"content": say(said[turn + 1]), "cache_control": {"type": "ephemeral"}}
                messages += [{"role": "user", "content": results}]
                messages += [{"role": "system", "content": "The user opened a.py."}] if turn == 0 else []
    prompt = large.llm.prompts[-1]  # type: ignore[attr-defined]
    assert "billing" not in prompt
    assert prompt.startswith("[tools] Bash Read Edit Write Glob Grep Task TodoWrite WebFetch NotebookEdit\n[system] ")
    assert "<think>Look first.</think>I will look.[call" in prompt
    assert "[system] The user opened a.py." in prompt
    assert prompt.count("[tool] ") == 3


def test_a_template_without_late_system_messages(large: Served) -> None:
    """Then they become part of a user's turn: the request is served all the same."""
    llm = large.llm
    assert isinstance(llm, DictatedLLM)
    llm.template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{ m.role }}] {{ m.content }}"
        "{{ '\\n' }}{% endfor %}[assistant] "
    )
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": say("ok")},
    ]
    try:
        reply = large.client.post("/v1/responses", json={"input": turns}).json()
        body = {"model": MODEL, "max_tokens": 100, "messages": turns}
        message = large.client.post("/v1/messages", json=body).json()
    finally:
        llm.reset()
    assert reply["output"][0]["content"][0]["text"] == message["content"][0]["text"] == "ok"
    folded = "[user] Hi\n<system-reminder>\nBe kind.\n</system-reminder>\nSAY:ok\n[assistant] "
    assert llm.prompts[-2:] == [folded, folded]


def test_agents_survive_their_own_broken_calls(large: Served) -> None:
    """A call that never became whole is told so, comes back, and the session goes on."""
    broken = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": '
    body = codex([{"type": "message", "role": "user", "content": say(broken)}], stream=False, max_output_tokens=500)
    reply = large.client.post("/v1/responses", json=body).json()
    (item,) = reply["output"]
    assert item["status"] == "incomplete"
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "bad arguments"}
    body = codex([as_codex_replays(item), output, {"role": "user", "content": say("ok")}], stream=False)
    after = large.client.post("/v1/responses", json=body)
    assert after.status_code == 200, after.text
    assert after.json()["output"][-1]["content"][0]["text"] == "ok"


def test_rules_as_messages_and_a_compaction_by_the_agent(large: Served) -> None:
    """What came goes back as it came, ids and all; then the agent asks for a summary itself and goes on with that."""
    said = [
        f"<think>Ask.</think>{call('agents_v1__spawn_agent', ids=['a'])}",
        "<think>Short.</think>We asked an agent.",
        "Done.",
    ]
    first = {"type": "message", "id": "msg_9", "role": "user", "content": say(said[0])}
    with openai.OpenAI(base_url=f"{large.url}/v1", api_key="none", max_retries=0) as client:

        def turn(body: dict[str, Any]) -> list[dict[str, Any]]:
            extra = {"client_metadata": body.pop("client_metadata")}
            events = list(client.responses.create(model=MODEL, **body, extra_body=extra))
            assert events[-1].type == "response.completed"
            return [event.item.to_dict() for event in events if event.type == "response.output_item.done"]

        thought, called = turn(codex_with_rules([first]))
        assert (called["namespace"], called["name"]) == ("agents_v1", "spawn_agent")
        output = {"type": "function_call_output", "id": "fco_1", "call_id": called["call_id"], "output": "ok"}
        wish = {"type": "message", "role": "user", "content": f"Write a summary. {say(said[1])}"}
        summary = turn(codex_with_rules([first, thought, called, output, wish], tools=[]))[-1]["content"][0]["text"]
        prompt = large.llm.prompts[-1]  # type: ignore[attr-defined]
        assert prompt.startswith(f"[system] {RULES}\n<permissions instructions>none</permissions>\n[user] <environment")
        assert "<think>Ask.</think>" in prompt
        assert "[tool] ok" in prompt
        again = {"type": "message", "role": "user", "content": f"{summary}\n{say(said[2])}"}
        (done,) = turn(codex_with_rules([again]))
        assert done["content"][0]["text"] == "Done."


def test_a_title(large: Served) -> None:
    said = '{"title": "Ducks"}'
    body = claude_title(say(said))
    with anthropic.Anthropic(base_url=large.url, api_key="none", max_retries=0, default_headers=BETA) as client:
        del body["stream"]
        with client.messages.stream(model=MODEL, **body) as stream:
            assert stream.get_final_text().startswith(said)
    assert large.llm.seen[-1]["constraint"].grammar is not None
    assert "billing" not in large.llm.prompts[-1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("choice", ["auto", "any"])
def test_tools_with_every_keyword(large: Served, choice: str) -> None:
    tools = [{"name": "report", "description": "Report.", "input_schema": EVERYTHING}]
    body = claude_code([{"role": "user", "content": say(call("report", level="high"))}], tools=tools, stream=False)
    response = large.client.post("/v1/messages", json=body | {"model": MODEL, "tool_choice": {"type": choice}})
    assert response.status_code == 200, response.text
    assert response.json()["content"][-1]["input"] == {"level": "high"}
    assert (large.llm.seen[-1]["constraint"] is not None) == (choice == "any")
