"""The shapes of replies, and that a stream says the same as a whole reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Served, echo_server
from tests.server.echo_llm import EchoLLM

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def events(text: str) -> list[dict[str, Any]]:
    frames = text.split("\n\n")
    assert frames[-1] == ""
    assert frames[-2] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def stream(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = served.client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(response.text)


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the deltas of each choice add up to."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "tokens": [], "ids": [], "finish": None})
            delta = choice.get("delta", {})
            whole["text"] += choice.get("text") or delta.get("content") or ""
            whole["role"] = delta.get("role", whole.get("role"))
            whole["ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            whole["tokens"] += logprobs.get("tokens") or logprobs.get("content") or []
            assert whole["finish"] is None, "nothing follows the finish reason"
            whole["finish"] = choice["finish_reason"]
    return choices


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 7},
    {"prompt": "hello", "max_tokens": 7, "n": 3},
    {"prompt": ["hello", "you"], "max_tokens": 4, "n": 2},
    {"prompt": [104, 105], "max_tokens": 3},
    {"prompt": [[104, 105], [106]], "max_tokens": 3},
    {"prompt": "hello", "max_tokens": 3, "logprobs": 1},
    {"prompt": "hello", "max_tokens": 3, "echo": True},
    {"prompt": "hello", "max_tokens": 3, "echo": True, "logprobs": 1},
    {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": "hello", "max_tokens": 6, "return_token_ids": True},
    {"prompt": "hello", "max_tokens": 3, "logprobs": 0, "return_tokens_as_token_ids": True},
    {"prompt": "hello", "max_tokens": 3, "truncate_prompt_tokens": 2},
    {"prompt": "hello", "max_tokens": 3, "truncate_prompt_tokens": 2, "truncation_side": "right", "echo": True},
]


@pytest.mark.parametrize("body", COMPLETIONS, ids=json.dumps)
def test_completion_stream_equals_reply(echo: Served, body: dict[str, Any]) -> None:
    whole = echo.client.post("/v1/completions", json=body).json()
    chunks = stream(echo, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert whole["object"] == "text_completion"
    assert [c["index"] for c in whole["choices"]] == list(range(len(whole["choices"])))
    parts = joined(chunks)
    for choice in whole["choices"]:
        part = parts[choice["index"]]
        assert part["text"] == choice["text"]
        assert part["finish"] == choice["finish_reason"]
        assert part["tokens"] == ((choice["logprobs"] or {}).get("tokens") or [])
        assert part["ids"] == choice.get("token_ids", [])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 5},
        {"max_completion_tokens": 5, "n": 2},
        {"max_tokens": 5, "logprobs": True},
        {"max_tokens": 5, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"max_tokens": 5, "messages": [*HI, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
        {
            "max_tokens": 5,
            "messages": [*HI, {"role": "assistant", "content": "Well"}],
            "continue_final_message": True,
            "echo": True,
        },
    ],
    ids=json.dumps,
)
def test_chat_stream_equals_reply(echo: Served, body: dict[str, Any]) -> None:
    body = {"messages": HI} | body
    whole = echo.client.post(CHAT, json=body).json()
    chunks = stream(echo, CHAT, body | {"stream_options": {"include_usage": True}})
    assert whole["object"] == "chat.completion"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    parts = joined(chunks)
    for choice in whole["choices"]:
        part = parts[choice["index"]]
        assert part["text"] == choice["message"]["content"]
        assert part["role"] == choice["message"]["role"] == "assistant"
        assert part["finish"] == choice["finish_reason"]
        assert part["tokens"] == ((choice["logprobs"] or {}).get("content") or [])
        assert part["ids"] == choice.get("token_ids", [])
    assert chunks[-1]["usage"] == whole["usage"]


def test_completion_logprobs(echo: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "logprobs": 1, "echo": True}
    logprobs = echo.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "a", "b"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"b": -0.5, "c": -9999.0}  # JSON has no -inf


def test_echo_of_the_prompt_alone_generates_nothing(echo: Served) -> None:
    reply = echo.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 0, "echo": True}).json()
    assert reply["choices"][0]["text"] == "abc"
    assert reply["usage"]["completion_tokens"] == 0


def test_chat_logprobs(echo: Served) -> None:
    body = {"messages": HI, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    entry = echo.client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"][0]
    assert entry == {
        "token": "u",
        "logprob": -0.5,
        "bytes": [117],
        "top_logprobs": [{"token": "u", "logprob": -0.5, "bytes": [117]}],
    }


def test_prompt_logprobs(echo: Served) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 1}
    first, second = echo.client.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["98"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}


def test_continuous_usage_counts_up(echo: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "ab", "max_tokens": 3, "stream_options": options}
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream(echo, "/v1/completions", body)]
    assert counts == [1, 2, 3, 3]


def test_every_sampling_field_reaches_the_engine(echo: Served) -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 7,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 4,
        "min_tokens": 2,
        "logprobs": 2,
        "logit_bias": {"5": -1.5},
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    extra = {"cache_salt": "salt", "request_id": "mine", "prompt": "hello"}
    assert echo.client.post("/v1/completions", json=fields | extra).json()["id"] == "cmpl-mine"
    seen = echo.llm.seen[-1]
    wanted = fields | {"logit_bias": {5: -1.5}}
    assert {name: getattr(seen["params"], name) for name in wanted} == wanted
    assert seen["cache_salt"] == "salt"
    assert seen["id"] == "cmpl-mine"


def test_the_models_own_sampling_defaults_are_used_unless_asked_otherwise() -> None:
    llm = EchoLLM(served_model_name=["echo"])
    llm.info.resolved.info.generation_defaults.update({"temperature": 0.6, "top_k": 20})
    with echo_server(llm) as served:
        served.client.post("/v1/completions", json={"prompt": "a", "top_k": 3})
    params = llm.seen[-1]["params"]
    assert (params.temperature, params.top_k) == (0.6, 3)


def test_the_template_gets_tools_and_kwargs_and_whole_prompt_is_shown_by_tokenize(echo: Served) -> None:
    body = {"messages": HI, "max_tokens": 1, "return_token_ids": True}
    ids = echo.client.post(CHAT, json=body).json()["prompt_token_ids"]
    shown = echo.client.post("/tokenize", json={"messages": HI}).json()
    assert shown["tokens"] == ids
    assert shown["count"] == len(ids)
    assert echo.client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "user: hi\nassistant: "}


def test_tokenize_text(echo: Served) -> None:
    reply = echo.client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True}).json()
    assert reply == {"count": 2, "max_model_len": 4096, "tokens": [104, 105], "token_strs": ["h", "i"]}


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HI}, {"prompt": 1}])
def test_tokenize_refuses(echo: Served, body: dict[str, Any]) -> None:
    assert echo.client.post("/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("tokens", [[256], [-1], ["a"], "a", None])
def test_detokenize_refuses(echo: Served, tokens: Any) -> None:
    response = echo.client.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


def test_models(echo: Served) -> None:
    cards = echo.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["echo"]
    assert cards[0] == echo.client.get("/v1/models/echo").json()
    assert cards[0]["max_model_len"] == 4096


@pytest.fixture(scope="module")
def with_request_ids() -> Iterator[Served]:
    with echo_server(enable_request_id_headers=True) as served:
        yield served


@pytest.mark.parametrize("is_stream", [False, True])
def test_request_ids_are_echoed(with_request_ids: Served, is_stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 1, "stream": is_stream}
    reply = with_request_ids.client.post("/v1/completions", json=body, headers={"X-Request-Id": "abc"})
    assert reply.headers["x-request-id"] == "abc"
    assert '"cmpl-abc"' in reply.text


def test_a_header_id_may_come_twice(with_request_ids: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for _ in range(2):
        with_request_ids.client.post("/v1/completions", json=body, headers={"X-Request-Id": "again"})
    engine_ids = [seen["id"] for seen in with_request_ids.llm.seen if "again" in seen["id"]]
    assert len(set(engine_ids)) == 2


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, "chat.completion"),
        ({"prompt": "hi", "max_tokens": 2}, "text_completion"),
        ({"input": "hi", "max_output_tokens": 2}, "response"),
    ],
)
def test_invocations_are_told_apart_by_their_fields(echo: Served, body: dict[str, Any], kind: str) -> None:
    answer = echo.client.post("/invocations", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["object"] == kind


def test_invocations_of_nothing_known(echo: Served) -> None:
    answer = echo.client.post("/invocations", json={"question": "hi"})
    assert answer.status_code == 400
    assert "messages" in answer.json()["error"]["message"]
    assert echo.client.get("/v1/models/no-such").status_code == 404
    assert echo.client.get(f"/v1/models/{echo.service.names[0]}").json()["id"] == echo.service.names[0]
