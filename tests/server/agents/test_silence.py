"""Streams that have nothing to say for a while say so, and prompts that are too long are told in words agents know."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.agents.conftest import MODEL
from tests.server.agents.dictated_llm import DictatedLLM, say
from tests.server.conftest import Served, echo_server
from tests.server.process import send_raw

USER = [{"role": "user", "content": say("Hello you")}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": say("Hello you")},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 100, "model": MODEL},
}


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    llm = DictatedLLM(context=1000, served_model_name=[MODEL])
    with echo_server(llm, keepalive_interval=0.02) as served:
        llm.step, llm.delay = 5, 0.1
        yield served


@pytest.mark.parametrize("path", STREAMS)
def test_silence_is_filled(slow: Served, path: str) -> None:
    text = slow.client.post(path, json=STREAMS[path] | {"stream": True}).text
    alive = 'event: ping\ndata: {"type":"ping"}' if path == "/v1/messages" else ": keepalive"
    frames = text.removesuffix("\n\n").split("\n\n")
    before, _, after = "\n\n".join(frames).partition("Hello")
    assert before.count(alive) > 1, "while the prompt is computed"
    assert after.count(alive) > 1, "between two tokens"
    assert frames[-1] != alive


def test_clients_do_not_notice(slow: Served) -> None:
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))  # type: ignore[arg-type]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello you"
        with client.responses.stream(model=MODEL, input=say("Hello you")) as stream:
            assert [event.sequence_number for event in stream] == list(range(10))
            assert stream.get_final_response().output_text == "Hello you"
    with (
        anthropic.Anthropic(base_url=slow.url, api_key="none", max_retries=0) as claude,
        claude.messages.stream(model=MODEL, max_tokens=100, messages=USER) as message,  # type: ignore[arg-type]
    ):
        assert message.get_final_text() == "Hello you"


@pytest.mark.parametrize("path", STREAMS)
def test_who_leaves_a_silent_stream_is_noticed(slow: Served, path: str) -> None:
    llm = slow.llm
    llm.frozen = True
    try:
        connection = send_raw(slow.url, path, **STREAMS[path], stream=True)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert slow.wait_until(lambda: bool(llm.running))
        connection.close()
        assert slow.wait_until(lambda: not llm.running)
    finally:
        llm.frozen = False


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_breaks_in_its_silence(slow: Served, path: str) -> None:
    llm = slow.llm
    assert isinstance(llm, DictatedLLM)
    llm.breaks_after = 1
    try:
        frames = slow.client.post(path, json=STREAMS[path] | {"stream": True}).text.split("\n\n")
    finally:
        llm.breaks_after = None
    last = frames[-3] if path.endswith("completions") else frames[-2]
    assert "internal error" in last
    assert sum("internal error" in frame for frame in frames) == 1


def test_an_interval_of_nothing_is_silence() -> None:
    llm = DictatedLLM(served_model_name=[MODEL])
    with echo_server(llm, keepalive_interval=0) as served:
        llm.delay = 0.05
        text = served.client.post("/v1/chat/completions", json={"messages": USER, "stream": True}).text
    assert ":keepalive" not in text.replace(" ", "")


# What agents look for in a refusal, to shorten the conversation and ask again
TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum.* maximum context length is (\d+) tokens")
LONG = [{"role": "user", "content": "x" * 2000}]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", STREAMS)
def test_a_prompt_that_is_too_long(slow: Served, path: str, streams: bool) -> None:
    body = STREAMS[path] | {"stream": streams}
    field = next(name for name in ("prompt", "messages", "input") if name in body)
    response = slow.client.post(path, json=body | {field: "x" * 2000 if field == "prompt" else LONG})
    if path == "/v1/responses" and streams:
        assert response.status_code == 200
        kinds = re.findall("event: (.*)", response.text)
        assert kinds == ["response.created", "response.in_progress", "response.failed"]
        assert '"code":"context_length_exceeded"' in response.text
        found = TOO_LONG.search(response.text)
    else:
        assert response.status_code == 400
        error = response.json()["error"]
        assert error.get("param", field) == field
        found = TOO_LONG.search(error["message"])
    assert found is not None
    assert int(found[1]) >= 2000
    assert found.groups()[1:] == ("999", "1000")
