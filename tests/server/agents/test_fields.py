"""The tables of fields, row by row: what is taken works, what is refused is named, what is absent means the default.

A field that is in no table is not there: the last test says so.
"""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.anthropic.body import MessagesBody
from quire.server.generate.protocol import ChatBatchBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from quire.server.responses.body import SHARED as SHARED_WITH_RESPONSES
from quire.server.responses.body import ResponsesBody
from quire.types.sampling import SamplingParams
from tests.server.agents.field_tables import (
    BASE,
    BATCH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    OPENAI,
    REFUSED,
    RESPONSES,
    SAMPLING,
    SAMPLING_REFUSED,
    TAKEN,
    Answered,
    Effect,
)
from tests.server.conftest import Served

DEFAULTS = SamplingParams()


def ask(served: Served, path: str, **fields: Any) -> Answered:
    response = served.client.post(path, json=BASE[path] | fields)
    assert response.status_code == 200, response.text
    return Answered(served.llm.seen[-1] if served.llm.seen else {}, response.json())


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(("field", "value", "meant"), SAMPLING, ids=lambda value: str(value)[:30])
def test_sampling(served: Served, path: str, field: str, value: Any, meant: Any) -> None:
    assert getattr(ask(served, path, **{field: value}).params, field) == meant


@pytest.mark.parametrize("path", OPENAI)
def test_what_is_absent_means_the_default(served: Served, path: str) -> None:
    names = {row[0] for row in SAMPLING}
    for absent in ({}, dict.fromkeys(names)):
        params = ask(served, path, **absent).params
        assert {name: getattr(params, name) for name in names} == {name: getattr(DEFAULTS, name) for name in names}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, BATCH, RESPONSES])
@pytest.mark.parametrize(("field", "value"), SAMPLING_REFUSED, ids=lambda value: str(value)[:30])
def test_sampling_refused(served: Served, path: str, field: str, value: Any) -> None:
    refused(served, path, field, value)


def refused(served: Served, path: str, field: str, value: Any) -> None:
    before = len(served.llm.seen)
    response = served.client.post(path, json=BASE[path] | {field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.get("param", field).partition("[")[0] == field
    assert field in error["message"]
    assert len(served.llm.seen) == before


@pytest.mark.parametrize(
    ("path", "fields", "effect"), TAKEN, ids=lambda value: "" if callable(value) else str(value)[:60]
)
def test_taken(served: Served, path: str, fields: dict[str, Any], effect: Effect | None) -> None:
    answered = ask(served, path, **fields)
    assert effect is None or effect(answered), (answered.seen, answered.reply)


@pytest.mark.parametrize(("path", "field", "value"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(served: Served, path: str, field: str, value: Any) -> None:
    refused(served, path, field, value)


@pytest.mark.parametrize("path", BASE)
def test_unknown_fields_and_nulls_are_ignored(served: Served, path: str) -> None:
    nothing = {name: None for body in (CompletionBody, ChatBody, ResponsesBody) for name in body.model_fields}
    ask(served, path, **{name: None for name in nothing if name not in BASE[path]}, no_such_field=[1])


# Fields whose tests are elsewhere: of a stream, of a stored response, of what other files are about.
ELSEWHERE = {
    *("stream", "previous_response_id", "shared", "continue_final_message", "add_generation_prompt"),
    *(
        "truncate_prompt_tokens",
        "truncation_side",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "prompt_embeds",
    ),
    *("logprob_token_ids", "repetition_detection", "logits_processors", "vllm_xargs", "early_stopping"),
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, CompletionBody),
        (CHAT, ChatBody),
        (BATCH, ChatBatchBody),
        (RESPONSES, ResponsesBody),
        (MESSAGES, MessagesBody),
        ("/tokenize", TokenizeBody),
        ("/detokenize", DetokenizeBody),
    ],
)
def test_every_field_has_its_row(path: str, body: Any) -> None:
    paths = {path, CHAT} if path in (BATCH, "/tokenize") else {path}
    named = set(BASE[path]) | ELSEWHERE | {row[0] for row in (*SAMPLING, *SAMPLING_REFUSED)}
    named |= {name for at, fields, _ in TAKEN if at in paths for name in fields}
    named |= {name for at, name, _ in REFUSED if at in paths}
    fields = {*body.model_fields, *(SHARED_WITH_RESPONSES if path == RESPONSES else ())}
    assert not fields - named
