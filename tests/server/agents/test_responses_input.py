"""What /v1/responses accepts, and how it is said to the model; every mistake names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.agents.dictated_llm import DictatedLLM, say
from tests.server.agents.test_responses import TOOLS
from tests.server.conftest import Served

USER = {"role": "user", "content": say("x")}


def test_items_as_the_template_gets_them(served: Served, llm: DictatedLLM) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"q": 1}', "status": "completed"}
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "Two"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "T", "annotations": []}]},
        call,
        {**call, "call_id": "c2", "arguments": ""},
        {"type": "function_call", "call_id": "c3", "name": "look", "arguments": '{"cut', "status": "incomplete"},
        {"type": "function_call_output", "call_id": "c2", "output": "two"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        {"role": "assistant", "content": "Then"},
        {"role": "system", "content": "Later"},
        USER,
    ]
    body = {"instructions": "Be kind.", "input": items, "tools": TOOLS}
    response = served.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert llm.prompts[-1] == (
        "[tools] look add\n[system] Be kind.\nRules\n[user] One\nTwo\n"
        '[assistant] <think>hm</think>T[call c1 look {"q": 1}][call c2 look {}][call c3 look {}]\n'
        "[tool] two\n[tool] one\n"
        "[assistant] <think>short</think>Then\n[system] Later\n[user] SAY:x\n[assistant] "
    )


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, "[tools] add\n"),
        ("none", "[tools] look add\n"),
        ("auto", "[tools] look add\n"),
    ],
    ids=str,
)
def test_tool_choice(served: Served, llm: DictatedLLM, choice: Any, shown: str) -> None:
    hosted = {"type": "web_search", "external_web_access": False}
    body = {"input": say("x"), "tools": [*TOOLS, hosted], "tool_choice": choice}
    reply = served.client.post("/v1/responses", json=body).json()
    assert llm.prompts[-1].startswith(shown)
    assert [tool["name"] for tool in reply["tools"]] == ["look", "add"], "only what the model can call is echoed"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}], ids=str)
def test_a_call_that_must_come_binds_the_answer(served: Served, llm: DictatedLLM, choice: Any) -> None:
    served.client.post("/v1/responses", json={"input": say("x"), "tools": TOOLS, "tool_choice": choice})
    assert llm.seen[-1]["constraint"].grammar is not None


def test_sampling_fields(served: Served, llm: DictatedLLM) -> None:
    body = {
        "temperature": 0.3,
        "top_p": 0.8,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 9,
        "stop": ["zz"],
        "ignore_eos": True,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logit_bias": {"65": 3},
        "max_output_tokens": 77,
    }
    reply = served.client.post("/v1/responses", json={"input": say("x"), "cache_salt": "s", **body}).json()
    params = llm.seen[-1]["params"]
    for name, value in body.items():
        wanted = {65: 3.0} if name == "logit_bias" else value
        assert getattr(params, {"max_output_tokens": "max_tokens"}.get(name, name)) == wanted
    assert llm.seen[-1]["cache_salt"] == "s"
    assert (reply["presence_penalty"], reply["frequency_penalty"]) == (0.5, -0.5)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": 3}),
    ("input", {"input": []}),
    ("input", {"input": ["x"]}),
    ("input", {"input": [{"type": "image_generation_call"}]}),
    ("input", {"input": [{"role": "robot", "content": "x"}]}),
    ("input", {"input": [{"role": "user"}]}),
    ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
    ("input", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
    ("input", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{a"}]}),
    ("input", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]}),
    ("input", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
    ("input", {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}),
    ("background", {"background": True, "store": False}),
    ("conversation", {"conversation": "c"}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("include", {"include": ["everything"]}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_tool_calls", {"max_tool_calls": 0}),
    ("metadata", {"metadata": {str(i): "x" for i in range(17)}}),
    ("metadata", {"metadata": {"x" * 65: "x"}}),
    ("metadata", {"metadata": {"x": "y" * 513}}),
    ("metadata", {"metadata": {"x": 1}}),
    ("reasoning", {"reasoning": {"effort": "wild"}}),
    ("reasoning", {"reasoning": "high"}),
    ("service_tier", {"service_tier": "gold"}),
    ("text", {"text": {"format": {"type": "xml"}}}),
    ("text", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ("text", {"text": {"verbosity": "chatty"}}),
    ("tools", {"tools": [{"type": "web_search"}]}),
    ("tools", {"tools": [{"name": "f"}]}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tools", {"tools": [{"type": "function", "name": "f", "parameters": 3}]}),
    ("tools", {"tools": [TOOLS[0], TOOLS[0]]}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "sometimes"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "nope"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "web_search"}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("truncation", {"truncation": "some"}),
    ("request_id", {"request_id": "a/b"}),
    ("temperature", {"temperature": 9}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -5}),
    ("seed", {"seed": "x"}),
    ("stop", {"stop": [""]}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("logit_bias", {"logit_bias": {"one": 1}}),
    ("cache_salt", {"cache_salt": ""}),
    ("priority", {"priority": 1}),
    ("stream", {"stream": "yes"}),
    ("kv_transfer_params", {"kv_transfer_params": {"a": 1}}),
    ("moderation", {"moderation": {"model": "x"}}),
    ("previous_input_messages", {"previous_input_messages": [{}]}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
]


@pytest.mark.parametrize(("field", "change"), BAD, ids=lambda x: json.dumps(x)[:60])
def test_bad_input(served: Served, field: str, change: dict[str, Any]) -> None:
    response = served.client.post("/v1/responses", json={"input": "x"} | change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    assert (error["param"] or "").partition("[")[0] == field, error
    assert field in error["message"]


@pytest.mark.parametrize("path", ["", "/cancel", "/input_items"])
def test_unknown_ids(served: Served, path: str) -> None:
    method = "POST" if path == "/cancel" else "GET"
    response = served.client.request(method, f"/v1/responses/resp_nowhere{path}")
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (404, "invalid_request_error", "response_id")
