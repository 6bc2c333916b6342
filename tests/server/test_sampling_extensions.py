"""What a request may add to sampling, over HTTP: a server with logits processors, asked by the official client."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors import safe_open

from quire.config.resolve import DEMO_MODEL
from tests.e2e.processors import ALL
from tests.server.process import ServerProcess, server_process

HI = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    arguments = ["--port", "0", "--device", "cpu", "--max-model-len", "256", "--served-model-name", "demo"]
    arguments += ["--enable-prompt-embeds", "--dtype", "float32"]  # the same numbers in any company
    with server_process("quire.cli.main", "serve", *arguments, "--logits-processors", *ALL) as process:
        assert process.url
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **options: Any) -> Any:
    extra = {name: options.pop(name) for name in [*options] if name not in ("stream", "logprobs", "max_tokens")}
    options = {"max_tokens": 6, **options}
    return client.completions.create(
        model="demo", prompt="hello", extra_body={"return_token_ids": True, **extra}, **options
    )


def test_arguments_reach_the_processors(client: openai.OpenAI) -> None:
    reply = complete(client, vllm_xargs={"force": [40, 41, 42]}, temperature=0)
    assert reply.choices[0].token_ids[:3] == [40, 41, 42]
    chunks = list(complete(client, vllm_xargs={"force": [50, 51]}, stream=True))
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids][:2] == [50, 51]
    chat = client.chat.completions.create(
        model="demo", messages=HI, max_tokens=3, extra_body={"vllm_xargs": {"force": [60]}, "return_token_ids": True}
    )
    assert chat.choices[0].token_ids[0] == 60


def test_a_failure_is_one_requests_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the logits processor Force failed: ZeroDivisionError"):
        complete(client, vllm_xargs={"fail_at": 2}, ignore_eos=True)
    stream = complete(client, vllm_xargs={"fail_at": 2}, ignore_eos=True, stream=True)
    with pytest.raises(openai.APIError, match="Force failed"):
        list(stream)
    assert complete(client).choices[0].finish_reason in ("length", "stop")


def test_log_probabilities_of_given_ids(client: openai.OpenAI) -> None:
    options = {"logprob_token_ids": [5, 6, 7], "return_tokens_as_token_ids": True, "temperature": 0, "ignore_eos": True}
    reply = complete(client, logprobs=0, **options)
    logprobs = reply.choices[0].logprobs
    for token, entries in zip(reply.choices[0].token_ids, logprobs.top_logprobs, strict=True):
        assert set(entries) == {f"token_id:{i}" for i in (token, 5, 6, 7)}
    chunks = list(complete(client, logprobs=0, stream=True, **options))
    assert [e for chunk in chunks for e in chunk.choices[0].logprobs.top_logprobs] == logprobs.top_logprobs
    chat = client.chat.completions.create(
        model="demo", messages=HI, max_tokens=2, logprobs=True, extra_body={**options, "return_token_ids": True}
    )
    for token, content in zip(chat.choices[0].token_ids, chat.choices[0].logprobs.content, strict=True):
        assert {entry.token for entry in content.top_logprobs} == {f"token_id:{i}" for i in (token, 5, 6, 7)}


def test_repetition(client: openai.OpenAI) -> None:
    circles = {"allowed_token_ids": [40], "repetition_detection": {"max_pattern_size": 3, "min_count": 4}}
    choice = complete(client, max_tokens=50, ignore_eos=True, **circles).choices[0]
    assert (choice.finish_reason, choice.stop_reason, choice.token_ids) == (
        "repetition",
        "repetition_detected",
        [40] * 4,
    )
    chat = client.chat.completions.create(model="demo", messages=HI, max_tokens=50, extra_body=circles)
    assert chat.choices[0].finish_reason == "repetition"


def embeddings(ids: list[int]) -> np.ndarray:
    """The demo model's own."""
    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as file:
        return file.get_tensor("model.embed_tokens.weight")[ids].float().numpy()


def as_base64(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


def test_prompts_as_embeddings(client: openai.OpenAI, server: ServerProcess) -> None:
    """The embeddings of a prompt's ids are that prompt."""
    prompts = [[300, 301, 302, 303, 304], [20] * 40]
    options = {"model": "demo", "max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    by_ids = httpx.post(f"{server.url}/v1/completions", json={**options, "prompt": prompts}, timeout=60).json()
    given = [as_base64(embeddings(ids)) for ids in prompts]
    reply = httpx.post(f"{server.url}/v1/completions", json={**options, "prompt_embeds": given}, timeout=60).json()
    assert "choices" in reply, reply
    assert [c["token_ids"] for c in reply["choices"]] == [c["token_ids"] for c in by_ids["choices"]]
    assert [c["text"] for c in reply["choices"]] == [c["text"] for c in by_ids["choices"]]
    assert reply["usage"]["prompt_tokens"] == 45
    chunks = client.completions.create(
        model="demo", prompt=None, max_tokens=8, temperature=0, stream=True,
        extra_body={"prompt_embeds": given[0], "ignore_eos": True},
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks) == by_ids["choices"][0]["text"]


def torch_saved() -> str:
    stream = io.BytesIO()
    torch.save(torch.zeros(2, 3), stream)
    return base64.b64encode(stream.getvalue()).decode()


EMBEDS: list[tuple[str, dict[str, Any]]] = [
    ("prompt_embeds", {"prompt_embeds": "x"}),
    ("prompt_embeds", {"prompt_embeds": []}),
    ("prompt_embeds", {"prompt_embeds": 3}),
    ("prompt_embeds", {"prompt_embeds": torch_saved()}),
    ("prompt_embeds", {"prompt_embeds": as_base64(np.zeros((2, 3), np.float32))}),
    ("prompt_embeds", {"prompt_embeds": as_base64(np.full((2, 3), np.inf, np.float32))}),
    ("prompt", {"prompt_embeds": as_base64(np.zeros((2, 3), np.float32)), "prompt": "x"}),
    ("echo", {"prompt_embeds": as_base64(np.zeros((2, 3), np.float32)), "echo": True}),
]


@pytest.mark.parametrize(("field", "given"), EMBEDS, ids=range(len(EMBEDS)))
def test_bad_embeddings(server: ServerProcess, field: str, given: dict[str, Any]) -> None:
    reply = httpx.post(f"{server.url}/v1/completions", json={"model": "demo", **given}, timeout=30)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("vllm_xargs", {"vllm_xargs": {"force": "x"}}),
        ("vllm_xargs", {"vllm_xargs": {"force": ["x"]}}),
        ("vllm_xargs", {"vllm_xargs": [1]}),
        ("vllm_xargs", {"vllm_xargs": {"force": [1] * 40_000}}),
        ("logits_processors", {"logits_processors": ["a"]}),
        ("logprob_token_ids", {"logprob_token_ids": [1]}),
        ("logprob_token_ids", {"logprob_token_ids": [], "logprobs": 1}),
        ("logprob_token_ids", {"logprob_token_ids": [10**9], "logprobs": 1}),
        ("logprob_token_ids", {"logprob_token_ids": [1] * 129, "logprobs": 1}),
        ("logprob_token_ids", {"logprob_token_ids": "a", "logprobs": 1}),
        ("logprob_token_ids", {"logprob_token_ids": [1], "logprobs": 1, "echo": True, "max_tokens": 0}),
        ("repetition_detection", {"repetition_detection": {"max_pattern_size": 3}}),
        ("repetition_detection", {"repetition_detection": {"max_pattern_size": 10**6, "min_count": 2}}),
        ("repetition_detection", {"repetition_detection": {"min_count": -1}}),
        ("repetition_detection", {"repetition_detection": {"what": 1}}),
        ("repetition_detection", {"repetition_detection": 3}),
    ],
)
def test_bad_fields(server: ServerProcess, field: str, given: dict[str, Any]) -> None:
    reply = httpx.post(f"{server.url}/v1/completions", json={"model": "demo", "prompt": "x", **given}, timeout=30)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field
    assert field in error["message"]
