"""No field of any body, whatever stands in it, holds up the loop, grows out of hand, or comes back in an error."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from quire.config.serve import ServeConfig
from quire.foundation.errors import InputError
from quire.foundation.shown import shown
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.frontend.tokenization.truncation import encode_texts
from quire.server.anthropic.body import MessagesBody
from quire.server.app import build_app
from quire.server.batches.lines import post
from quire.server.generate.protocol import ChatBody
from quire.server.http import body as bodies
from quire.server.http.body import Body
from quire.server.http.errors import explain
from quire.server.http.field_limits import OTHERS, TEXTS, USUAL, most_bytes
from quire.server.http.shape import MAX_LISTS, MAX_VALUES
from quire.server.responses.body import ResponsesBody
from quire.server.service import Service
from quire.server.tokens.protocol import ChatDerenderBody
from tests.server.echo_llm import EchoLLM

MAX_ERROR = 8 * 1024  # bytes: 1,024 characters, each of which may take six in JSON, and a little
LONGEST_TURN = 0.5  # seconds of the loop's processor time; on a quiet machine none takes a tenth of it
NOISE = 0.2  # seconds of processor time: what takes less is not looked at
MESSAGES = [{"role": "user", "content": "hi"}]
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/completions/derender": {
        "completion_request": {"prompt": "a"},
        "prompt_tokens": [1],
        "generate_responses": [{"choices": [{"token_ids": [97]}]}],
    },
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/chat/completions/batch": {"messages": [MESSAGES], "max_tokens": 1},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/chat/completions/derender": {
        "chat_request": {"messages": MESSAGES},
        "prompt_tokens": 1,
        "generate_response": {"choices": [{"token_ids": [97]}]},
    },
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/responses/compact": {"input": "a"},
    "/v1/messages": {"model": "echo", "max_tokens": 1, "messages": MESSAGES},
    "/v1/messages/count_tokens": {"model": "echo", "messages": MESSAGES},
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {"max_tokens": 1}},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [98]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
}
POOLING = {"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"} | {
    "/v2/embed"  # refused by a model that generates; how their bodies are read is the same for all
}


@pytest.fixture(scope="module")
def app() -> FastAPI:
    llm = EchoLLM(served_model_name=["echo"])
    service = Service(llm.info.resolved.config, ServeConfig(port=0, trust_request_chat_template=True))
    service.attach(llm)  # type: ignore[arg-type]
    return build_app(service)


def fields_of(app: FastAPI, path: str) -> list[str]:
    content = app.openapi()["paths"][path]["post"]["requestBody"]["content"]
    return list(content["application/json"]["schema"]["properties"])


def kinds() -> Iterator[type[Body]]:
    """All bodies there are."""
    pending: list[type[Body]] = [Body]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        yield kind


def values(size: int) -> dict[str, Any]:
    """Of about `size` bytes each."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {
        "text": "a" * size,
        "texts": ["ab"] * (size // 5),
        "words": [f"w{i}" for i in range(size // 9)],
        "numbers": [1] * (size // 2),
        "lists": [[1]] * (size // 4),
        "messages": [{"role": "user", "content": "x"}] * (size // 31),
        "roles": [{"role": "a" * size, "type": "b" * size, "content": "x"}],
        "parts": [{"role": "user", "content": [{"type": "text", "text": "x"}] * (size // 26)}],
        "thoughts": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}] * (size // 70),
        "items": [{"type": "reasoning", "content": [{"text": "x"}]}] * (size // 50),
        "tools": [
            {"type": "function", "name": f"f{i}", "function": {"name": f"f{i}", "parameters": schema}}
            for i in range(size // 130)
        ],
        "pairs": {str(i): 1.0 for i in range(size // 11)},
    }


def test_every_route_that_takes_json_is_here(app: FastAPI) -> None:
    taking = {
        path
        for path, methods in app.openapi()["paths"].items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert taking == GENERATING.keys() | POOLING


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_every_field_has_a_limit_that_is_seen_before_its_value_is_made(kind: type[Body]) -> None:
    for name in {*kind.model_fields, *kind.also_read}:
        most = kind.max_bytes.get(name, most_bytes(name))
        if most is None:
            assert name in TEXTS
            continue
        raw = b'{"%b": "%b"}' % (name.encode(), b"a" * most)
        with pytest.raises(InputError) as error:
            bodies.read(raw, kind, "")
        assert error.value.param == (kind.within or name)
        path = f"{kind.within}.{name}" if kind.within else name
        assert error.value.message == f"{path} takes {most + 2} bytes of JSON, and may take {most}"


LONG_SCHEMA = {"type": "object", "properties": {f"p{i}": {"description": "x" * 50} for i in range(2000)}}
HI = {"role": "user", "content": "Hi"}
LONG_FORMAT = {"type": "json_schema", "name": "a", "schema": LONG_SCHEMA}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [HI], "response_format": {"type": "json_schema", "json_schema": LONG_FORMAT}}),
        (ResponsesBody, {"input": "a", "text": {"format": LONG_FORMAT}}),
        (MessagesBody, {"messages": [HI], "max_tokens": 1, "output_config": {"format": LONG_FORMAT}}),
        (
            ChatDerenderBody,
            {
                "generate_response": {"choices": [{"token_ids": [12345] * 20_000}]},
                "prompt_tokens": 1,
                "chat_request": {"messages": [HI]},
            },
        ),
    ],
)
def test_what_lies_within_a_field_may_be_as_long_as_in_other_apis(kind: type[Body], body: dict[str, Any]) -> None:
    raw = json.dumps({"model": "m", **body}).encode()
    assert len(raw) > USUAL
    bodies.read(raw, kind, "")


def test_limits_are_of_fields_that_there_are() -> None:
    names = {name for kind in kinds() for name in {*kind.model_fields, *kind.also_read}}
    assert names >= {*TEXTS, *OTHERS}
    assert min(OTHERS.values()) > USUAL


@pytest.mark.parametrize("value", [b"[" + b"1," * MAX_VALUES + b"1]", b"[" + b"{}," * MAX_LISTS + b"{}]"])
def test_a_body_of_very_many_values_is_refused_unread(value: bytes) -> None:
    with pytest.raises(InputError, match="prompt holds too much: a body may have") as error:
        bodies.check_shape(b'{"model": "\\"[", "prompt": %b}' % value)
    assert error.value.param == "prompt"


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_one_error_for_a_list_of_wrong_items(kind: type[Body]) -> None:
    """Else a body of a million of them would be answered after a million errors are made."""
    for name in kind.model_fields:
        for wrong in ([1.5] * 1000, [[1.5] * 1000]):
            try:
                kind.model_validate({name: wrong})
            except ValidationError as error:
                about = [item for item in error.errors() if item["loc"][:1] == (name,)]
                assert len(about) < 10, name
            except InputError:
                pass


class Turns:
    """Processor time of the loop's turns, the longest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest = 0.0
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            before = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - before)

        monkeypatch.setattr(asyncio.Handle, "_run", timed)


async def ask(app: FastAPI, path: str, fields: dict[str, Any]) -> float:
    """Processor time of the process."""
    raw = orjson.dumps(GENERATING[path] | fields)
    await asyncio.sleep(0)
    before = time.process_time()
    status, reply = await post(app, path, raw, "x")
    cost = time.process_time() - before
    assert status != 500, reply
    assert status == 200 or len(reply) <= MAX_ERROR, reply
    return cost


def check(
    app: FastAPI, path: str, names: list[str], size: int, monkeypatch: pytest.MonkeyPatch, share: float = 1.0
) -> None:
    """Every field with values of `size` bytes of every shape, or with a share of them."""
    turns, draw = Turns(monkeypatch), random.Random(path)

    async def ask_all() -> None:
        small, large = values(size // 10), values(size)
        await ask(app, path, {})
        for name in names:
            for shape in large:
                if draw.random() > share and shape != "text":
                    continue
                turns.longest = 0.0
                cost = await ask(app, path, {name: large[shape]})
                assert turns.longest < LONGEST_TURN, (name, shape)
                if cost > NOISE:
                    assert cost <= 15 * await ask(app, path, {name: small[shape]}), (name, shape, cost)

    gc.collect()
    gc.freeze()  # as the server does: else a look at all objects of the tests is counted
    gc.disable()
    try:
        asyncio.run(ask_all())
    finally:
        gc.enable()


def texts_of(app: FastAPI, path: str) -> list[str]:
    return [name for name in fields_of(app, path) if name in TEXTS or name in ("tools", "model")]


@pytest.mark.parametrize("path", GENERATING)
def test_no_field_holds_up_the_loop_or_grows_out_of_hand(
    app: FastAPI, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At about the size that fields may have."""
    check(app, path, fields_of(app, path), 60_000, monkeypatch, share=0.1)


@pytest.mark.parametrize("path", GENERATING)
def test_nor_does_one_that_is_long(app: FastAPI, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(app, path, texts_of(app, path), 1_500_000, monkeypatch, share=0.2)


@pytest.mark.long
@pytest.mark.parametrize("path", GENERATING)
def test_none_with_any_value(app: FastAPI, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(app, path, fields_of(app, path), 60_000, monkeypatch)
    check(app, path, texts_of(app, path), 6_000_000, monkeypatch)


LONG_TEXTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["a", "TEXT"]},
    "/v1/completions/render": {"prompt": "TEXT"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "TEXT"}]},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, [{"role": "user", "content": "TEXT"}]]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": [{"type": "text", "text": "TEXT"}]}]},
    "/v1/responses": {"instructions": "TEXT"},
    "/v1/responses/input_tokens": {"input": "TEXT"},
    "/v1/messages": {"system": "TEXT"},
    "/v1/messages/count_tokens": {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "TEXT"}]}]},
    "/generative_scoring": {"items": ["a", "TEXT"]},
    "/tokenize": {"prompt": "TEXT"},
}


@pytest.mark.parametrize("path", LONG_TEXTS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_text_that_is_too_long_is_refused_unread(
    app: FastAPI, path: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(tokenizer: Tokenizer, texts: list[str], *args: Any, **kwargs: Any) -> list[list[int]]:
        assert sum(map(len, texts)) < 1000, "was encoded"
        return encode_texts(tokenizer, texts, *args, **kwargs)

    def ask(*_args: Any) -> bytes:
        raise AssertionError("was encoded elsewhere")

    monkeypatch.setattr("quire.frontend.tokenization.encoder.encode_texts", encode)
    monkeypatch.setattr("quire.foundation.async_forks.AsyncForks.ask", ask)
    raw = orjson.dumps(GENERATING[path] | LONG_TEXTS[path] | ({"truncate_prompt_tokens": 5} if is_cut else {}))
    status, reply = asyncio.run(post(app, path, raw.replace(b"TEXT", b"a" * 2_000_000), "x"))
    assert status == 400
    assert b"the prompt is too long" in reply
    assert b"maximum" in reply


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_what_a_template_of_a_request_writes_is_encoded_aside(
    app: FastAPI, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_args: Any, **_kwargs: Any) -> list[list[int]]:
        raise AssertionError("was encoded in this process")

    monkeypatch.setattr("quire.frontend.tokenization.encoder.encode_texts", encode)
    turns = Turns(monkeypatch)
    fields = {"messages": MESSAGES, "chat_template": "{{ 'ab ' * 333333 }}", "max_tokens": 1}
    if path != "/tokenize":
        fields["truncate_prompt_tokens"] = 5
    status, reply = asyncio.run(post(app, path, orjson.dumps(fields), "x"))
    assert status == 200, reply
    assert orjson.loads(reply).get("count", 999_999) == 999_999
    assert turns.longest < LONGEST_TURN


@pytest.mark.parametrize("length", [10, 300_000])
def test_a_wrong_value_is_shown_in_part(length: int) -> None:
    long = "x" * length
    for value in (long, [long] * 9, {long: long}, [[[[[[long]]]]]], b"x" * length, 10**length, (long,), True, None):
        for error in (InputError(f"f: {shown(value)}", "f"), InputError(str(type(value)) + long, long)):
            _, message, param = explain(error)
            assert len(message) + len(param or "") < MAX_ERROR
