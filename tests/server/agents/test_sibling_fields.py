"""A field that another endpoint has is known, or refused by name, or changes no answer: none is dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from quire.foundation.errors import InputError
from quire.server.anthropic.body import CountTokensBody, MessagesBody
from quire.server.generate.protocol import ChatBatchBody, ChatBody, CompletionBody
from quire.server.http.body import CHANGES_NOTHING, Body
from quire.server.pooling.protocol import (
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingBody,
    PoolBody,
    RerankBody,
    ScoreBody,
)
from quire.server.responses.body import CountBody, ResponsesBody
from quire.server.tokens.protocol import GenerativeScoringBody, TokenGenerateBody
from tests.server.conftest import Served, echo_server

FAMILIES: list[list[type[Body]]] = [
    [CompletionBody, ChatBody, ChatBatchBody, ResponsesBody, MessagesBody, TokenGenerateBody, GenerativeScoringBody],
    [EmbeddingBody, PoolBody, ClassifyBody, ScoreBody, RerankBody, CohereEmbedBody],
]
CHAT = [{"role": "user", "content": "Hi"}]
SHORTER = {CountBody: ResponsesBody, CountTokensBody: MessagesBody}  # what decides on the prompt of the other


def cases() -> list[Any]:
    found = []
    for family in FAMILIES:
        names = {name for kind in family for name in (*kind.model_fields, *kind.unsupported)}
        for kind in family:
            known = CHANGES_NOTHING.union(kind.model_fields, kind.without_effect, kind.also_read)
            found += [pytest.param(kind, name, id=f"{kind.__name__} {name}") for name in sorted(names - known)]
    return found


@pytest.mark.parametrize(("kind", "name"), cases())
def test_what_a_sibling_knows_is_refused_by_name(kind: type[Body], name: str) -> None:
    with pytest.raises(ValidationError, match=rf"\b{name} is not ") as caught:
        kind.model_validate({name: ["anything"]})
    error = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, InputError)
    assert error.param == name


@pytest.mark.parametrize(("kind", "whole"), SHORTER.items())
def test_prompts_are_counted_of_whole_requests(kind: type[Body], whole: type[Body]) -> None:
    fields = dict.fromkeys(whole.model_fields.keys() - kind.model_fields.keys(), "anything")
    prompt = {"input": "Hi"} if kind is CountBody else {"messages": CHAT}
    kind.model_validate({"model": "echo"} | prompt | fields)


@pytest.mark.parametrize(
    ("path", "body", "field", "instead"),
    [
        ("/v1/responses", {"input": "Hi", "n": 2}, "n", ""),
        ("/v1/responses", {"input": "Hi", "max_tokens": 5}, "max_tokens", "max_output_tokens"),
        (
            "/v1/responses",
            {"input": "Hi", "response_format": {"type": "text"}},
            "response_format",
            "text.format",
        ),
        ("/v1/responses", {"input": "Hi", "echo": True}, "echo", ""),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "system": "Be brief."},
            "system",
            "",
        ),
        ("/v1/completions", {"prompt": "Hi", "tools": [{"type": "function"}]}, "tools", ""),
        ("/v1/completions", {"prompt": "Hi", "max_completion_tokens": 5}, "max_completion_tokens", "max_tokens"),
        ("/v1/completions", {"prompt": "Hi", "stream": True, "prompt_logprobs": 0}, "prompt_logprobs", "stream=false"),
        ("/inference/v1/generate", {"token_ids": [1], "max_tokens": 5}, "max_tokens", ""),
        ("/tokenize", {"prompt": "Hi", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", ""),
    ],
)
def test_over_http(echo: Served, path: str, body: dict[str, Any], field: str, instead: str) -> None:
    reply = echo.client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field
    assert instead in error["message"]


def test_what_says_the_usual_says_nothing(echo: Served) -> None:
    """Clients that write every field of every endpoint go on working."""
    usual = {"n": 1, "echo": False, "logprobs": False, "suffix": "", "documents": [], "system": None, "best_of": None}
    harmless = {"metadata": {"a": "b"}, "store": False, "user": "me", "service_tier": "auto", "no_such_field": 1}
    reply = echo.client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4} | usual | harmless)
    assert reply.status_code == 200, reply.text


def test_tokens_are_those_of_the_chat() -> None:
    """What shapes a chat's prompt shapes what /tokenize counts."""
    template = "{{ reasoning_effort }} {{ enable_thinking }} {{ verbosity }} {{ documents | length }}"
    body = {"reasoning_effort": "none", "verbosity": "low", "documents": [{"text": "a"}], "chat_template": template}
    with echo_server(trust_request_chat_template=True) as served:
        reply = served.client.post("/tokenize", json={"messages": CHAT} | body)
    assert bytes(reply.json()["tokens"]).decode() == "none False low 1"
