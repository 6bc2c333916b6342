"""LangChain's models against real servers: messages, streams, tools, structured output, batches, async, embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel

from tests.pooling import checkpoints
from tests.pooling.checkpoints import sentence_transformers
from tests.server.process import server_process
from tests.server.thinking_model import make_thinking_model

langchain = pytest.importorskip("langchain_openai")
OPTIONS = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--served-model-name", "it"]


class Move(BaseModel):
    """Move somewhere."""

    to: Literal["up", "down"]
    steps: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model: Path = make_thinking_model(tmp_path_factory.mktemp("thinker"))
    with server_process("quire.cli.main", "serve", str(model), *OPTIONS) as server:
        yield server.url


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    """Runs coroutines in one loop: a client keeps its connections."""
    with asyncio.Runner() as runner:
        yield runner.run


def connect(url: str, **options: Any) -> Any:
    fields = {"thinking_token_budget": 8}
    return langchain.ChatOpenAI(
        model="it",
        base_url=f"{url}/v1",
        api_key="none",
        **{"temperature": 1.0, "seed": 3, "max_tokens": 200, "max_retries": 0, "extra_body": fields} | options,
    )


@pytest.fixture(scope="module")
def chat(url: str) -> Any:
    return connect(url)


def together(chunks: Any) -> Any:
    whole: Any = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, run: Any, method: str) -> None:
    bound = chat.with_structured_output(Move, method=method)
    assert isinstance(bound.invoke("Where to?"), Move)
    assert isinstance(together(bound.stream("Where to?")), Move) or method == "json_schema"
    assert isinstance(run(bound.ainvoke("Where to?")), Move)
    raw = chat.with_structured_output(Move, method=method, include_raw=True, strict=True).invoke("Where to?")
    assert raw["parsing_error"] is None


@pytest.mark.parametrize("choice", ["required", "Move"])
def test_tools_go_around(chat: Any, choice: str) -> None:
    """A call, its result, and the next call, which sees both."""
    bound = chat.bind_tools([Move], tool_choice=choice, parallel_tool_calls=False)
    messages: list[Any] = [("human", "Where to?")]
    for _ in range(2):
        answer = bound.invoke(messages)
        (call,) = answer.tool_calls
        assert not answer.invalid_tool_calls
        assert Move(**call["args"])
        messages += [answer, {"role": "tool", "content": "done", "tool_call_id": call["id"]}]
    streamed = together(bound.stream(messages[:1]))
    first = bound.invoke(messages[:1])
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(c["name"], c["args"]) for c in first.tool_calls]


@pytest.mark.parametrize("responses", [False, True])
def test_streams_add_up(url: str, run: Any, responses: bool) -> None:
    """On either API, synchronous or not."""
    options = {"use_responses_api": True, "seed": None, "temperature": 0} if responses else {"stream_usage": True}
    chat = connect(url, **options)
    question = [("system", "Be brief."), ("human", "Who are you?")]
    whole = chat.invoke(question)
    streamed = together(chat.stream(question))

    async def parts() -> list[Any]:
        return [chunk async for chunk in chat.astream(question)]

    later = together(run(parts()))
    for other in (streamed, later, run(chat.ainvoke(question))):
        assert other.text == whole.text
        assert other.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
        assert other.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]
    assert "think>" not in whole.text


def test_logprobs_and_stops(chat: Any) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2, max_tokens=12).invoke("Hello")
    entries = answer.response_metadata["logprobs"]["content"]
    assert len(entries) == answer.usage_metadata["output_tokens"]
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    assert answer.response_metadata["finish_reason"] == "length"
    free = chat.invoke("Hello").content
    mark = free[len(free) // 2 : len(free) // 2 + 3]
    assert chat.invoke("Hello", stop=[mark]).content == free.partition(mark)[0]


def test_plain_answers_and_batches(chat: Any, run: Any) -> None:
    answers = chat.batch(["Hello", "Who are you?"])
    answers += run(chat.abatch(["Hello", "Who are you?"]))
    assert [answer.content for answer in answers[:2]] == [answer.content for answer in answers[2:]]
    for answer in answers:
        assert answer.usage_metadata["output_tokens"] > 0
        assert "think>" not in answer.content


def test_completions(url: str) -> None:
    model = langchain.OpenAI(model="it", base_url=f"{url}/v1", api_key="none", max_tokens=9, temperature=0)
    assert "".join(model.stream("Once")) == model.invoke("Once")


def test_a_prompt_that_is_too_long_is_told_apart(chat: Any) -> None:
    overflow = pytest.importorskip("langchain_core.exceptions").ContextOverflowError
    with pytest.raises(overflow):
        chat.invoke("word " * 3000)


def test_embeddings(tmp_path: Path, run: Any) -> None:
    checkpoints.make("BertModel", tmp_path)
    sentence_transformers(tmp_path, "Pooling", "Normalize", pooling_mode_cls_token=True)
    texts = ["w1 w2", "w3", "w1 w2"]
    with server_process("quire.cli.main", "serve", str(tmp_path), *OPTIONS) as server:
        options: dict[str, Any] = {"model": "it", "base_url": f"{server.url}/v1", "api_key": "none"}
        plain = langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
        vectors = plain.embed_documents(texts)
        np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-6)
        np.testing.assert_allclose(vectors[1], plain.embed_query("w3"), atol=1e-6)
        np.testing.assert_allclose(vectors, run(plain.aembed_documents(texts)), atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
