"""LangChain's chat model against a real server: tools, structured output, streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.server.process import server_process
from tests.server.thinking_model import make_thinking_model

langchain = pytest.importorskip("langchain_openai")


class Move(BaseModel):
    """Move somewhere."""

    to: Literal["up", "down"]
    steps: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model: Path = make_thinking_model(tmp_path_factory.mktemp("thinker"))
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--served-model-name", "it"]
    with server_process("quire.cli.main", "serve", str(model), *options) as server:
        yield langchain.ChatOpenAI(
            model="it",
            base_url=f"{server.url}/v1",
            api_key="none",
            temperature=1.0,
            seed=3,
            max_tokens=200,
            max_retries=0,
            extra_body={"thinking_token_budget": 8},
        )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    found = chat.with_structured_output(Move, method=method).invoke("Where to?")
    assert isinstance(found, Move)


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
    streamed: Any = None
    for chunk in bound.stream(messages[:1]):
        streamed = chunk if streamed is None else streamed + chunk
    first = bound.invoke(messages[:1])
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(c["name"], c["args"]) for c in first.tool_calls]


def test_plain_answers_and_batches(chat: Any) -> None:
    answers = chat.batch(["Hello", "Who are you?"])
    assert len(answers) == 2
    for answer in answers:
        assert answer.usage_metadata["output_tokens"] > 0
        assert "think>" not in answer.content
