"""Real requests with one thing wrong: a clear refusal or an answer, never a mistake of the server's."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.agents.agent_bodies import claude_code, codex
from tests.server.agents.conftest import MODEL
from tests.server.agents.dictated_llm import DictatedLLM, say
from tests.server.conftest import Served, echo_server

ODD: list[Any] = [None, 0, -1, 3.5, True, "", "x", [], [None], [[]], ["x"], {}, {"type": "x"}, {"a": {"b": [1]}}, 2**70]
CALL = {"type": "function_call", "call_id": "c", "name": "exec_command", "arguments": '{"cmd": "ls"}'}
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look"}]},
    {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "s"}],
        "content": None,
        "encrypted_content": "x",
    },
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
    CALL,
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "ok"}]},
    {"type": "custom_tool_call", "call_id": "d", "name": "apply_patch", "input": "p"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "done"},
    {"type": "message", "role": "user", "content": say("ok")},
]
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Look", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "c", "name": "Bash", "input": {"cmd": "ls"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "ok"}], "is_error": False},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}, "title": "t"},
            {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "r"}]},
        ],
    },
    {"role": "system", "content": "Later"},
    {"role": "user", "content": say("ok")},
]
BODIES = {
    "/v1/responses": codex(ITEMS, stream=False, max_output_tokens=50, metadata={"a": "b"}, temperature=0.5, top_p=0.9),
    "/v1/responses/input_tokens": codex(ITEMS),
    "/v1/messages": {"model": MODEL, **claude_code(TURNS, stream=False, max_tokens=50, stop_sequences=["zz"])},
    "/v1/messages/count_tokens": {"model": MODEL, **claude_code(TURNS)},
}


@pytest.fixture(scope="module")
def large() -> Iterator[Served]:
    with echo_server(DictatedLLM(context=100_000, served_model_name=[MODEL])) as served:
        yield served


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all values within a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.parametrize("path", BODIES)
def test_one_thing_wrong(large: Served, path: str) -> None:
    assert large.client.post(path, json=BODIES[path]).status_code == 200
    rng = random.Random(path)
    everywhere = list(places(BODIES[path]))
    refused = 0
    for _ in range(60):
        body = copy.deepcopy(BODIES[path])
        *way, last = rng.choice(everywhere)
        parent: Any = body
        for key in way:
            parent = parent[key]
        if rng.random() < 0.2:
            del parent[last]
        else:
            parent[last] = rng.choice(ODD)
        response = large.client.post(path, json=body)
        assert response.status_code in (200, 400, 404), (*way, last, parent, response.text)
        if response.status_code != 200:
            refused += 1
            assert response.json()["error"]["message"]
    assert refused > 3
