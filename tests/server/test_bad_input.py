"""Every mistake gets one 400 that names the field, and harms nobody."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import pytest

from quire.server.http.protocol import MAX_HEADER_BYTES
from quire.server.http.shape import MAX_JSON_DEPTH
from tests.server.conftest import Served, echo_server
from tests.server.process import PATIENCE

HUGE = 10**40

# field that the error must name, body
SHARED: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": True}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 1.5}),
    ("top_k", {"top_k": HUGE}),
    ("min_p", {"min_p": 2}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"n": "two"}),
    ("n", {"n": 2, "temperature": 0}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": "x"}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": [1]}),
    ("stop", {"stop": {"a": 1}}),
    ("stop", {"stop": [str(i) for i in range(65)]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": "1"}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": HUGE}),
    ("min_tokens", {"max_tokens": 3, "min_tokens": 4}),
    ("min_tokens", {"min_tokens": -1}),
    ("logit_bias", {"logit_bias": {"one": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": [1]}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("bad_words", {"bad_words": [""]}),
    ("prompt_logprobs", {"prompt_logprobs": -2}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": {"include_usage": 3}}),
    ("response_format", {"response_format": {"type": "json"}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": {"type": "json_object"}, "guided_regex": "a"}),
    ("response_format", {"response_format": "json"}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    ("structured_outputs", {"structured_outputs": {"rexeg": "a"}}),
    ("structured_outputs", {"structured_outputs": {"whitespace_pattern": " "}}),
    ("use_beam_search", {"use_beam_search": True, "stream": True}),
    ("stop", {"use_beam_search": True, "stop": "x"}),
    ("response_format", {"use_beam_search": True, "response_format": {"type": "json_object"}}),
    ("n", {"use_beam_search": True, "n": 65}),
    ("length_penalty", {"use_beam_search": True, "length_penalty": 1000}),
    ("early_stopping", {"use_beam_search": True, "early_stopping": "sometimes"}),
    ("priority", {"priority": 1}),
    ("priority", {"priority": HUGE}),
    ("cache_salt", {"cache_salt": ""}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("truncation_side", {"truncation_side": "middle"}),
    ("request_id", {"request_id": ""}),
    ("model", {"model": 3}),
]
COMPLETION: list[tuple[str, dict[str, Any]]] = [
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}),
    ("structured_outputs", {"structured_outputs": {"choice": []}}),
    ("structured_outputs", {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": 3}),
    ("prompt", {"prompt": {}}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [1, -1]}),
    ("prompt", {"prompt": [1, 1.5]}),
    ("prompt", {"prompt": [1, True]}),
    ("prompt", {"prompt": [[1], ["a"]]}),
    ("prompt", {"prompt": ["a"] * 1025}),
    ("n", {"prompt": ["a"] * 1000, "n": 2}),
    ("suffix", {"suffix": "end"}),
    ("best_of", {"best_of": 2}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("echo", {"echo": "yes"}),
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": ["hi"]}),
    ("messages", {"messages": [{"content": "hi"}]}),
    ("messages", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"role": "user", "content": 3}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("logprobs", {"logprobs": 2}),
    ("tools", {"tools": []}),
    ("tools", {"tools": [{"type": "web"}]}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("tools", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}),
    ("tool_choice", {"tool_choice": "any", "tools": TOOLS}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS}),
    ("tool_choice", {"tool_choice": {"type": "function"}, "tools": TOOLS}),
    ("thinking_token_budget", {"thinking_token_budget": -2}),
    ("thinking_token_budget", {"thinking_token_budget": 5}),  # a model that does not think
    ("max_thinking_tokens", {"max_thinking_tokens": 5}),
    ("include_reasoning", {"include_reasoning": "no"}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    ("chat_template", {"chat_template": "{{ x }}"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": "many"}),
]


def assert_refused(response: Any, field: str | None, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    param = (error["param"] or "").partition("[")[0].partition(".")[0]
    assert param == (field or ""), error
    if field:
        assert field in error["message"]


@pytest.mark.parametrize(("field", "change"), [*SHARED, *COMPLETION])
def test_completions(echo: Served, field: str, change: dict[str, Any]) -> None:
    assert_refused(echo.client.post("/v1/completions", json={"prompt": "a"} | change), field)


@pytest.mark.parametrize(("field", "change"), [*SHARED, *CHAT])
def test_chat(echo: Served, field: str, change: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | change
    assert_refused(echo.client.post("/v1/chat/completions", json=body), field)


BATCH: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": [[]]}),
    ("messages", {"messages": [{"role": "user", "content": "hi"}]}),
    ("n", {"n": 2}),
    ("stream", {"stream": True}),
    ("tools", {"tools": TOOLS}),
    ("tool_choice", {"tool_choice": "auto"}),
]


@pytest.mark.parametrize(("field", "change"), BATCH)
def test_chat_batch(echo: Served, field: str, change: dict[str, Any]) -> None:
    body = {"messages": [[{"role": "user", "content": "hi"}]]} | change
    assert_refused(echo.client.post("/v1/chat/completions/batch", json=body), field)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_has_its_status_in_streams_too(echo: Served, stream: bool) -> None:
    body = {"prompt": "a" * 4090, "max_tokens": 10, "stream": stream}
    assert_refused(echo.client.post("/v1/completions", json=body), "max_tokens")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a"} trailing',
        b"[" * 5000 + b"]" * 5000,
        b'{"prompt": "a", "user": ' + b"[" * 200 + b"]" * 200 + b"}",
    ],
)
def test_bodies_that_are_no_request(echo: Served, body: bytes) -> None:
    response = echo.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert_refused(response, None)


def test_nesting_up_to_the_limit_is_fine(echo: Served) -> None:
    depth = MAX_JSON_DEPTH - 1
    body = '{"prompt": "a", "ignored": ' + "[" * depth + "]" * depth + "}"
    response = echo.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200


def test_wrong_content_type(echo: Served) -> None:
    response = echo.client.post("/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": "text/plain"})
    assert_refused(response, None)


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_packed_bodies_are_refused_by_name(echo: Served, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = echo.client.post("/v1/completions", content=gzip.compress(b'{"prompt":"a"}'), headers=headers)
    assert_refused(response, None)
    assert encoding in response.json()["error"]["message"]


def test_a_field_that_is_missing_is_named_and_nothing_else_told(echo: Served) -> None:
    """The rest of the request may be long, and private."""
    for path, body, field in (
        ("/detokenize", {"model": "quire-echo"}, "tokens"),
        ("/inference/v1/generate", {"request_id": "mine"}, "token_ids"),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "secret"}]}, "model"),
    ):
        assert echo.client.post(path, json=body).json()["error"]["message"] == f"{field} is required"


def test_unknown_fields_are_ignored(echo: Served) -> None:
    assert echo.client.post("/v1/completions", json={"prompt": "a", "no_such_field": [1]}).status_code == 200


def test_null_means_not_given(echo: Served) -> None:
    names = ("max_tokens", "temperature", "n", "stop", "stream", "logprobs", "seed", "logit_bias", "echo", "user")
    response = echo.client.post("/v1/completions", json={"prompt": "a", **dict.fromkeys(names)})
    assert response.json()["usage"]["completion_tokens"] == 16


def test_unknown_model(echo: Served) -> None:
    response = echo.client.post("/v1/completions", json={"prompt": "a", "model": "gpt-9"})
    assert_refused(response, "model", 404)
    assert_refused(echo.client.get("/v1/models/gpt-9"), "model", 404)


def test_unknown_route_and_method(echo: Served) -> None:
    assert_refused(echo.client.get("/v2/nothing"), None, 404)
    assert_refused(echo.client.get("/v1/completions"), None, 405)


@pytest.mark.parametrize("announced", [True, False])
def test_a_large_body_is_refused(announced: bool) -> None:
    with echo_server(max_body_bytes=1000) as served:
        body = json.dumps({"prompt": "a" * 2000}).encode()
        content: Any = body if announced else iter([body[:900], body[900:]])
        response = served.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert_refused(response, None, 413)
        assert served.client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("line", [b"X-Header: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
def test_headers_without_end_are_cut_off(echo: Served, line: bytes) -> None:
    sent = 0
    with socket.create_connection(echo.address, timeout=PATIENCE) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n" + (b"" if line.endswith(b"\n") else b"X: "))
        try:
            while sent < 10 * MAX_HEADER_BYTES:
                connection.sendall(line)
                sent += len(line)
            answer = connection.recv(65536)
        except OSError:  # closed while we were still sending
            answer = b"HTTP/1.1 431"
    assert answer.startswith(b"HTTP/1.1 431")
    assert echo.client.get("/livez").status_code == 200


def test_many_requests_on_one_connection_are_not_taken_for_long_headers(echo: Served) -> None:
    request = b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 4000 + b"\r\n\r\n"
    with socket.create_connection(echo.address, timeout=PATIENCE) as connection:
        for _ in range(40):
            connection.sendall(request)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


HEADS = [
    (b"GET /" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "too-large"),
    (b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n", 431, "too-large"),
    (b"GET /livez HTTP/1.1\r\n" + b"X: a\r\n" * (MAX_HEADER_BYTES // 5) + b"\r\n", 431, "too-large"),
    (b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", 400, "bad-field"),
    ("GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 400, "bad-field"),
    (b"no request at all\r\n\r\n", 400, "bad-field"),
]


@pytest.mark.parametrize(("head", "status", "code"), HEADS)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_head_that_is_wrong_is_answered(echo: Served, head: bytes, status: int, code: str, is_first: bool) -> None:
    """However it comes, and also behind a request that was right."""
    with socket.create_connection(echo.address, timeout=PATIENCE) as connection:
        if not is_first:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(head)
        answer = connection.recv(65536).decode()
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert f"x-error-code: {code}\r\n" in answer
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == status
