"""Vectors for a purpose (`task`): an adapter of that name, words before a text, or both, as Jina Embeddings v3 has
them; compared with transformers' model and peft's adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import PeftModel

from quire import LLM
from quire.foundation.errors import InputError
from quire.types.adapter import LoRARequest
from tests.lora import adapters
from tests.pooling import encoders
from tests.pooling.checkpoints import WORDS, sentence_transformers
from tests.pooling.test_endpoints import serve

TARGETS = ["q_proj", "v_proj", "o_proj", "fc1", "fc2", "word_embeddings"]
PROMPTS = {"retrieval.query": "w7 w8 ", "text-matching": "", "plain": "w9 "}


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two adapters beside it."""
    folder = tmp_path_factory.mktemp("jina")
    model = encoders.make("jina_embeddings_v3", folder)
    sentence_transformers(folder, "Pooling", "Normalize", pooling_mode_mean_tokens=True)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    for seed, name in enumerate(("retrieval_query", "text_matching", "odd")):
        more = ["token_type_embeddings"] if name == "odd" else ["k_proj"] if seed else []
        adapters.make(model.base_model, folder / name, seed=seed, r=4, target_modules=[*TARGETS, *more])
    return folder


def expected(folder: Path, text: str, adapter: str | None) -> np.ndarray:
    model = encoders.transformers.AutoModel.from_pretrained(folder).float().eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(folder / adapter)).eval()
    ids = [2, *(WORDS.index(word) + 8 for word in text.split()), 3]
    with torch.inference_mode():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0), dim=0).numpy()


@pytest.fixture(scope="module")
def server(jina: Path) -> Iterator[str]:
    named = [f"{name}={jina / folder}" for name, folder in
             (("retrieval.query", "retrieval_query"), ("text-matching", "text_matching"))]  # fmt: skip
    with serve(jina, "--enable-lora", "--lora-modules", *named) as process:
        assert process.url
        yield process.url


@pytest.mark.parametrize(
    ("fields", "text", "adapter"),
    [
        ({}, "w1 w2 w3", None),
        ({"task": "embed"}, "w1 w2 w3", None),
        ({"task": "retrieval.query"}, "w7 w8 w1 w2 w3", "retrieval_query"),
        ({"task": "text-matching"}, "w1 w2 w3", "text_matching"),
        ({"task": "text-matching", "model": "text-matching"}, "w1 w2 w3", "text_matching"),
        ({"task": "plain"}, "w9 w1 w2 w3", None),
        ({"task": "plain", "model": "text-matching"}, "w9 w1 w2 w3", "text_matching"),
    ],
    ids=str,
)
def test_a_task_is_an_adapter_and_words(
    fields: dict[str, Any], text: str, adapter: str | None, server: str, jina: Path
) -> None:
    reply = httpx.post(f"{server}/v1/embeddings", json={"input": "w1 w2 w3", **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == fields.get("model", "tiny")
    assert np.abs(np.array(reply.json()["data"][0]["embedding"]) - expected(jina, text, adapter)).max() <= 1e-5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task": "separation"}, "there are: embed, plain, retrieval.query, text-matching"),
        ({"task": "retrieval.query", "model": "text-matching"}, "are two adapters"),
    ],
)
def test_tasks_that_cannot_be_are_named(fields: dict[str, Any], words: str, server: str) -> None:
    reply = httpx.post(f"{server}/v1/embeddings", json={"input": "w1", **fields}, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "task"
    assert words in reply.json()["error"]["message"]


def test_adapters_of_types_of_tokens_are_refused_by_name(jina: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "enable_lora": True}
    with LLM(str(jina), **options) as llm, pytest.raises(InputError, match=r"token_type_embeddings is no module"):
        llm.embed(["w1"], lora_request=LoRARequest("odd", 1, str(jina / "odd")), use_tqdm=False)
