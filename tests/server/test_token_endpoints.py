"""Token ids in, token ids out; what is rendered, generated and derendered is the reply that one request gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import quire.demo_model
from quire.frontend.tokenization.tokenizer import Tokenizer
from tests.server.conftest import echo_server
from tests.server.process import ServerProcess

HI = [{"role": "user", "content": "Hello! Who are you?"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def client(demo_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_server.url, timeout=60) as client:
        yield client


def post(client: httpx.Client, path: str, body: Any, status: int = 200) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def rounded(value: Any) -> Any:
    """Log-probabilities differ in the last places with the size of the step."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


def plain(reply: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one request to the next."""
    same = {k: v for k, v in reply.items() if k not in ("id", "created")}
    return rounded(same | {"usage": {k: v for k, v in reply["usage"].items() if k != "prompt_tokens_details"}})


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"seed": 1, "n": 2},
        {"seed": 1, "logprobs": True, "top_logprobs": 2},
        {"seed": 2, "stop": ["o", "zz"], "n": 3},
        {"seed": 2, "stop": "e", "include_stop_str_in_output": True, "logprobs": True},
        {"seed": 3, "max_tokens": None, "return_token_ids": True},
        {"seed": 4, "tools": TOOLS, "skip_special_tokens": False},
        {"temperature": 0.0, "response_format": {"type": "json_object"}},
        {"seed": 5, "truncate_prompt_tokens": 6},
    ],
    ids=json.dumps,
)
def test_chat_in_three_steps_is_chat(client: httpx.Client, options: dict[str, Any]) -> None:
    body = {"messages": HI, "max_tokens": 24} | options
    whole = post(client, "/v1/chat/completions", body)
    rendered = post(client, "/v1/chat/completions/render", body)
    assert len(rendered["token_ids"]) == whole["usage"]["prompt_tokens"]
    made = post(client, "/inference/v1/generate", rendered)
    given = {"generate_response": made, "prompt_tokens": made["usage"]["prompt_tokens"], "chat_request": body}
    again = post(client, "/v1/chat/completions/derender", given)
    assert plain(again) == plain(whole)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0, "logprobs": 2}, {"seed": 1, "n": 2, "stop": ["e"]}, {"seed": 1, "echo": True}]
)
def test_completions_in_three_steps_are_completions(client: httpx.Client, options: dict[str, Any]) -> None:
    body = {"prompt": ["Once upon", "The"], "max_tokens": 12} | options
    whole = post(client, "/v1/completions", body)
    rendered = post(client, "/v1/completions/render", body)
    made = [post(client, "/inference/v1/generate", one) for one in rendered]
    counts = [one["usage"]["prompt_tokens"] for one in made]
    given = {"generate_responses": made, "prompt_tokens": counts, "completion_request": body}
    assert plain(post(client, "/v1/completions/derender", given)) == plain(whole)


def test_streamed_tokens_add_up(client: httpx.Client) -> None:
    body = {
        "request_id": "mine",
        "token_ids": [5, 6, 7],
        "sampling_params": {"n": 2, "seed": 3, "max_tokens": 9, "ignore_eos": True, "logprobs": 1},
    }
    whole = post(client, "/inference/v1/generate", body)
    assert whole["request_id"] == "mine"
    assert [len(choice["token_ids"]) for choice in whole["choices"]] == [9, 9]
    ids: dict[int, list[int]] = {0: [], 1: []}
    logprobs: dict[int, list[Any]] = {0: [], 1: []}
    streamed = body | {"request_id": "other", "stream": True, "stream_options": {"include_usage": True}}
    lines = client.post("/inference/v1/generate", json=streamed).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice["token_ids"]
            logprobs[choice["index"]] += choice["logprobs"]["content"]
    for choice in whole["choices"]:
        assert ids[choice["index"]] == choice["token_ids"]
        assert [f"token_id:{i}" for i in choice["token_ids"]] == [entry["token"] for entry in logprobs[choice["index"]]]
        assert rounded(logprobs[choice["index"]]) == rounded(choice["logprobs"]["content"])
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 18


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [-1]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [10**9]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": "abc"}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"temperature": 3}}, "temperature"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"temperature": "x"}}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"speed": 3}}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"mm_hashes": {"image": ["x"]}}}, "features"),
        ("/generative_scoring", {"query": "a", "items": [], "label_token_ids": [1]}, "items"),
        ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
        ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [9**9]}, "label_token_ids"),
        ("/generative_scoring", {"query": "a", "items": ["b", [1]], "label_token_ids": [1]}, "items"),
        ("/generative_scoring", {"query": [10**7], "items": ["b"], "label_token_ids": [1]}, "items"),
        ("/generative_scoring", {"query": "a", "items": ["b" * 99999], "label_token_ids": [1]}, "items"),
        ("/v1/chat/completions/render", {"messages": HI, "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions/render", {"messages": HI, "use_beam_search": True}, "use_beam_search"),
        (
            "/v1/chat/completions/derender",
            {"chat_request": {"messages": HI}, "prompt_tokens": 3, "generate_response": {"choices": []}},
            "generate_response",
        ),
        (
            "/v1/chat/completions/derender",
            {
                "chat_request": {"messages": HI},
                "prompt_tokens": 3,
                "generate_response": {"choices": [{"token_ids": [-1]}]},
            },
            "generate_response",
        ),
        (
            "/v1/completions/derender",
            {
                "completion_request": {"prompt": ["a", "b"]},
                "prompt_tokens": [1],
                "generate_responses": [{"choices": [{"token_ids": [1]}]}],
            },
            "generate_responses",
        ),
    ],
    ids=str,
)
def test_mistakes_are_named(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert post(client, path, body, 400)["error"]["param"] == param


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("apply_softmax", [False, True])
def test_scores_of_labels_equal_transformers(client: httpx.Client, item_first: bool, apply_softmax: bool) -> None:
    folder = Path(quire.demo_model.__path__[0])
    tokenizer, labels = Tokenizer(folder), [300, 17, 2500]
    query, items = "Is the sky blue? ", ["Yes, it is", "No", "Perhaps "]
    body = {"query": query, "items": items, "label_token_ids": labels}
    body |= {"item_first": item_first, "apply_softmax": apply_softmax}
    reply = post(client, "/generative_scoring", body)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2]
    count = 0
    for entry, item in zip(reply["data"], items, strict=True):
        pieces = [tokenizer.encode(text) for text in ((item, query) if item_first else (query, item))]
        count += sum(map(len, pieces))
        with torch.inference_mode():
            logits = model(torch.tensor([pieces[0] + pieces[1]])).logits[0, -1]
        expected = logits[labels].softmax(-1)[0] if apply_softmax else logits.softmax(-1)[labels[0]]
        assert entry["score"] == pytest.approx(expected.item(), rel=1e-3, abs=1e-7)
    assert reply["usage"]["prompt_tokens"] == count
    as_ids = body | {"query": tokenizer.encode(query), "items": [tokenizer.encode(item) for item in items]}
    assert rounded(post(client, "/generative_scoring", as_ids)["data"]) == rounded(reply["data"])


def test_tokenizer_info(client: httpx.Client) -> None:
    folder = Path(quire.demo_model.__path__[0])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    info = client.get("/tokenizer_info").json()
    assert {name: info[name] for name in config if name != "chat_template"} == {
        name: value for name, value in config.items() if name != "chat_template"
    }
    assert info["chat_template"] == (folder / "chat_template.jinja").read_text()
    assert info["tokenizer_class"]
    with echo_server() as served:
        assert served.client.get("/tokenizer_info").status_code == 404
