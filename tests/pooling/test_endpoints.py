"""The pooling endpoints of real servers on tiny models: an embedder, a reranker, a classifier, a generator."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.pooling import checkpoints
from tests.pooling.checkpoints import WORDS, sentence_transformers
from tests.server.process import ServerProcess, send_raw, server_process, wait_until

TEXTS = ["w1 w2 w3", "w9", "w4 w5 w6 w7 w8 w9 w10", "w3 w2 w1"]


def serve(folder: Path, *arguments: str) -> Any:
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--served-model-name", "tiny"]
    return server_process("quire.cli.main", "serve", str(folder), *options, *arguments)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Any]]:
    folder = tmp_path_factory.mktemp("embedder")
    model = checkpoints.make("BertModel", folder)
    sentence_transformers(folder, "Pooling", "Normalize", pooling_mode_cls_token=True)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "w7 w8 "}}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    overrides = json.dumps({"matryoshka_dimensions": [16, 32]})
    options = ["--max-model-len", "40", "--batch-dir", str(folder / "batches")]
    with serve(folder, "--hf-overrides", overrides, *options) as process:
        assert process.url
        yield process, model


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Any]]:
    folder = tmp_path_factory.mktemp("reranker")
    model = checkpoints.make("XLMRobertaForSequenceClassification", folder, num_labels=1)
    with serve(folder) as process:
        assert process.url
        yield process, model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Any]]:
    folder = tmp_path_factory.mktemp("classifier")
    labels = {0: "sad", 1: "glad", 2: "neither"}
    model = checkpoints.make("Qwen3ForSequenceClassification", folder, id2label=labels)
    with serve(folder) as process:
        assert process.url
        yield process, model


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def ids_of(text: str) -> list[int]:
    return [2, *(WORDS.index(word) + 8 for word in text.split()), 3]


def embedding(model: Any, text: str, size: int = 48) -> np.ndarray:
    state = checkpoints.states(model, ids_of(text))[0][:size]
    return torch.nn.functional.normalize(state, dim=0).numpy()


# Embeddings


def test_every_form_of_input(embedder: tuple[ServerProcess, Any]) -> None:
    server, model = embedder
    expected = [embedding(model, text) for text in TEXTS]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for given in (TEXTS, [ids_of(text) for text in TEXTS]):
            reply = client.embeddings.create(model="tiny", input=given)
            assert np.abs(np.array([item.embedding for item in reply.data]) - expected).max() < 1e-5
            assert reply.usage.prompt_tokens == sum(len(ids_of(text)) for text in TEXTS)
        for given in (TEXTS[0], ids_of(TEXTS[0])):
            reply = client.embeddings.create(model="tiny", input=given)
            assert np.abs(np.array(reply.data[0].embedding) - expected[0]).max() < 1e-5
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    for body in ({"messages": chats[0]}, {"messages": chats}, {"input": chats}):
        found = post(server, "/v1/embeddings", **body, add_special_tokens=True)["data"]
        assert np.abs(np.array(found[0]["embedding"]) - expected[0]).max() < 1e-5
        assert len(found) == (1 if isinstance(next(iter(body.values()))[0], dict) else len(TEXTS))


def test_matryoshka_dimensions(embedder: tuple[ServerProcess, Any]) -> None:
    server, model = embedder
    found = post(server, "/v1/embeddings", input=TEXTS, dimensions=16)["data"]
    expected = [embedding(model, text, 16) for text in TEXTS]
    assert np.abs(np.array([item["embedding"] for item in found]) - expected).max() < 1e-5
    assert refused(server, "/v1/embeddings", input="w1", dimensions=17)["param"] == "dimensions"
    raw = post(server, "/v1/embeddings", input="w1", use_activation=False)["data"][0]["embedding"]
    assert np.abs(np.array(raw) - checkpoints.states(model, ids_of("w1"))[0].numpy()).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_vectors_as_bytes(embedder: tuple[ServerProcess, Any], dtype: str, endianness: str) -> None:
    server, model = embedder
    options = {"embed_dtype": dtype, "endianness": endianness, "input": TEXTS}
    expected = np.array([embedding(model, text) for text in TEXTS])
    coded = post(server, "/v1/embeddings", **options, encoding_format="base64")["data"]
    pieces = [base64.b64decode(item["embedding"]) for item in coded]
    assert np.abs(numbers(b"".join(pieces), dtype, endianness) - expected.ravel()).max() < 4e-3
    for kind in ("bytes", "bytes_only"):
        reply = httpx.post(f"{server.url}/v1/embeddings", json={**options, "encoding_format": kind})
        assert reply.headers["content-type"] == "application/octet-stream"
        assert len(reply.content) == sum(map(len, pieces))
        # Not the same bits each time: the texts may share a step with others.
        assert np.abs(numbers(reply.content, dtype, endianness) - expected.ravel()).max() < 4e-3
        assert ("metadata" in reply.headers) == (kind == "bytes")
        if kind == "bytes":
            metadata = json.loads(reply.headers["metadata"])
            assert [item["end"] - item["start"] for item in metadata["data"]] == [len(piece) for piece in pieces]
            assert metadata["usage"]["prompt_tokens"] == sum(len(ids_of(text)) for text in TEXTS)


def numbers(content: bytes, dtype: str, endianness: str) -> np.ndarray:
    order = {"native": "=", "little": "<", "big": ">"}[endianness]
    if dtype == "bfloat16":
        bits = np.frombuffer(content, np.dtype(np.uint16).newbyteorder(order)).astype(np.uint32) << 16
        return bits.view(np.float32)
    return np.frombuffer(content, np.dtype(dtype).newbyteorder(order)).astype(np.float32)


def test_pooling_gives_vectors_of_tokens_too(embedder: tuple[ServerProcess, Any]) -> None:
    server, model = embedder
    whole = post(server, "/pooling", input=TEXTS[0])["data"][0]["data"]
    assert np.abs(np.array(whole) - embedding(model, TEXTS[0])).max() < 1e-5
    by_token = post(server, "/pooling", input=TEXTS, task="token_embed")["data"]
    for text, item in zip(TEXTS, by_token, strict=True):
        states = torch.nn.functional.normalize(checkpoints.states(model, ids_of(text)), dim=1).numpy()
        assert np.abs(np.array(item["data"]) - states).max() < 1e-5
    assert refused(server, "/pooling", input="w1", task="score")["param"] == "task"
    assert refused(server, "/pooling", input="w1", dimensions=16)["param"] == "dimensions"


def test_embeddings_as_cohere_has_them(embedder: tuple[ServerProcess, Any]) -> None:
    server, model = embedder
    types = ["float", "binary", "ubinary", "base64"]
    reply = post(server, "/v2/embed", model="tiny", texts=TEXTS, input_type="search_query", embedding_types=types)
    assert reply["response_type"] == "embeddings_by_type"
    assert reply["texts"] == TEXTS
    assert list(reply["embeddings"]) == types
    for i, text in enumerate(TEXTS):
        expected = embedding(model, "w7 w8 " + text)  # what the model wants before a query
        ours = reply["embeddings"]
        assert np.abs(np.array(ours["float"][i]) - expected).max() < 1e-5
        assert ours["ubinary"][i] == np.packbits(np.array(ours["float"][i]) > 0).tolist()
        assert [value + 128 for value in ours["binary"][i]] == ours["ubinary"][i]
        assert np.frombuffer(base64.b64decode(ours["base64"][i]), "<f4").tolist() == pytest.approx(ours["float"][i])
    long = " ".join(WORDS[:100])
    for truncate, kept in (("END", WORDS[:38]), ("START", WORDS[62:100])):
        found = post(server, "/v2/embed", texts=[long], truncate=truncate)["embeddings"]["float"][0]
        assert np.abs(np.array(found) - embedding(model, " ".join(kept))).max() < 1e-5
    assert refused(server, "/v2/embed", texts=[long], truncate="NONE")["param"] == "texts"
    found = post(server, "/v2/embed", texts=[long], truncate_prompt_tokens=10)["embeddings"]["float"][0]
    assert np.abs(np.array(found) - embedding(model, " ".join(WORDS[:8]))).max() < 1e-5
    assert refused(server, "/v2/embed", images=["x"])["param"] == "images"
    for path in ("/score", "/rerank"):
        body = {"query": "w1", "documents": ["w2"]} if path == "/rerank" else {"text_1": "w1", "text_2": "w2"}
        assert refused(server, path, chat_template="{{ 1 }}", **body)["param"] == "chat_template"


BAD_INPUT: list[tuple[str, dict[str, Any]]] = [
    ("input", {}),
    ("input", {"input": []}),
    ("input", {"input": 5}),
    ("input", {"input": [[]]}),
    ("input", {"input": ["a", [1]]}),
    ("input", {"input": [[1], ["a"]]}),
    ("input", {"input": [True]}),
    ("input", {"input": [[1, 10**9]]}),
    ("input", {"input": [[-1]]}),
    ("input", {"input": ["w1"] * 2049}),
    ("input", {"input": " ".join(WORDS[:39])}),
    ("input", {"input": "w1", "messages": [{"role": "user", "content": "w1"}]}),
    ("messages", {"messages": []}),
    ("messages", {"messages": ["w1"]}),
    ("messages", {"messages": [[{"role": "user", "content": "w1"}], "w1"]}),
    ("messages[0].role", {"messages": [{"content": "w1"}]}),
    ("prompt", {"input": "a\ud800"}),
    ("encoding_format", {"input": "w1", "encoding_format": "hex"}),
    ("embed_dtype", {"input": "w1", "embed_dtype": "int4"}),
    ("dimensions", {"input": "w1", "dimensions": 0}),
    ("dimensions", {"input": "w1", "dimensions": "16"}),
    ("dimensions", {"input": "w1", "dimensions": 10**30}),
    ("truncate_prompt_tokens", {"input": "w1", "truncate_prompt_tokens": -2}),
    ("truncate_prompt_tokens", {"input": "w1", "truncate_prompt_tokens": 41}),
    ("truncate_prompt_tokens", {"input": "w1 w2", "truncate_prompt_tokens": 2}),
    ("truncation_side", {"input": "w1", "truncation_side": "middle"}),
    ("truncate_prompt_tokens", {"input": "w1", "truncate_prompt_tokens": 0}),
    ("chat_template", {"messages": [{"role": "user", "content": "w1"}], "chat_template": "x"}),
    ("normalize", {"input": "w1", "normalize": True}),
    ("use_activation", {"input": "w1", "use_activation": "yes"}),
    ("priority", {"input": "w1", "priority": 1}),
    ("cache_salt", {"input": "w1", "cache_salt": ""}),
]


@pytest.mark.parametrize(("field", "body"), BAD_INPUT, ids=[f"{n}-{field}" for n, (field, _) in enumerate(BAD_INPUT)])
def test_bad_input_is_named(embedder: tuple[ServerProcess, Any], field: str, body: dict[str, Any]) -> None:
    reply = httpx.post(
        f"{embedder[0].url}/v1/embeddings",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert reply.status_code == 400, reply.text
    if "\ud800" not in str(body.get("input")):
        assert reply.json()["error"]["param"] == field
    assert post(embedder[0], "/v1/embeddings", input="w1")["data"]


def test_a_cut_text_keeps_its_frame(embedder: tuple[ServerProcess, Any]) -> None:
    server, model = embedder
    for side, kept in (("right", WORDS[:8]), ("left", WORDS[42:50])):
        body = {"input": " ".join(WORDS[:50]), "truncate_prompt_tokens": 10, "truncation_side": side}
        found = post(server, "/v1/embeddings", **body)["data"][0]["embedding"]
        assert np.abs(np.array(found) - embedding(model, " ".join(kept))).max() < 1e-5


def test_an_unknown_model_and_the_wrong_kind_of_model(embedder: tuple[ServerProcess, Any]) -> None:
    server, _ = embedder
    assert httpx.post(f"{server.url}/v1/embeddings", json={"model": "x", "input": "w1"}).status_code == 404
    for path, body in [
        ("/v1/completions", {"prompt": "w1"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}], "stream": True}),
    ]:
        assert "does not generate" in refused(server, path, **body)["message"]
    assert "task 'classify' is not possible" in refused(server, "/classify", input="w1")["message"]


def test_clients_that_hang_up_leave_nothing_behind(embedder: tuple[ServerProcess, Any]) -> None:
    server, _ = embedder
    texts = [" ".join(WORDS[i % 50 : i % 50 + 30]) for i in range(150)]
    for _ in range(3):
        send_raw(server.url, "/v1/embeddings", input=texts).close()
    time.sleep(1)  # so that they have begun
    assert wait_until(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 0})
    assert wait_until(lambda: gauge(server, "quire:seats_used") == gauge(server, "vllm:num_requests_waiting") == 0)
    before = gauge(server, "vllm:request_prompt_tokens_count")
    assert len(post(server, "/v1/embeddings", input=texts)["data"]) == 150
    assert gauge(server, "vllm:request_prompt_tokens_count") == before + 150
    assert gauge(server, "quire:kv_blocks") == gauge(server, "quire:kv_blocks_free")


def gauge(server: ServerProcess, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return float(next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name + "{")))


# Classes and scores


def test_classes(classifier: tuple[ServerProcess, Any]) -> None:
    server, model = classifier
    texts = ["w1 w2 w3", "w9"]
    reply = post(server, "/classify", input=texts)
    for text, item in zip(texts, reply["data"], strict=True):
        with torch.inference_mode():
            probs = model(torch.tensor([[WORDS.index(w) + 8 for w in text.split()]])).logits[0].softmax(0)
        assert item["probs"] == pytest.approx(probs.tolist(), abs=1e-5)
        assert item["label"] == ["sad", "glad", "neither"][int(probs.argmax())]
        assert item["num_classes"] == 3
    assert reply["usage"]["prompt_tokens"] == 4
    assert "has 3 classes" in refused(server, "/score", text_1="w1", text_2="w2")["message"]
    assert "embed" in refused(server, "/v1/embeddings", input="w1")["message"]


def pair_score(model: Any, query: str, document: str) -> float:
    tokens = [*ids_of(query), 3, *ids_of(document)[1:]]
    with torch.inference_mode():
        return float(model(torch.tensor([tokens])).logits[0, 0].sigmoid())


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]
)
def test_scores(reranker: tuple[ServerProcess, Any], names: tuple[str, str]) -> None:
    server, model = reranker
    one = post(server, "/score", **{names[0]: "w5 w6", names[1]: TEXTS})
    assert [item["score"] for item in one["data"]] == pytest.approx(
        [pair_score(model, "w5 w6", t) for t in TEXTS], abs=1e-5
    )
    assert one["usage"]["prompt_tokens"] == sum(len(ids_of(t)) + 4 for t in TEXTS)
    many = post(server, "/v1/score", **{names[0]: TEXTS, names[1]: TEXTS[::-1]})
    expected = [pair_score(model, a, b) for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert [item["score"] for item in many["data"]] == pytest.approx(expected, abs=1e-5)
    assert refused(server, "/score", **{names[0]: ["w1", "w2"], names[1]: ["w1", "w2", "w3"]})["param"] == names[1]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_reranking(reranker: tuple[ServerProcess, Any], path: str) -> None:
    server, model = reranker
    scores = [pair_score(model, "w5 w6", text) for text in TEXTS]
    reply = post(server, path, query="w5 w6", documents=[TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]])
    order = sorted(range(len(TEXTS)), key=lambda i: -scores[i])
    assert [item["index"] for item in reply["results"]] == order
    assert [item["relevance_score"] for item in reply["results"]] == pytest.approx([scores[i] for i in order], abs=1e-5)
    assert [item["document"]["text"] for item in reply["results"]] == [TEXTS[i] for i in order]
    assert len(post(server, path, query="w5 w6", documents=TEXTS, top_n=2)["results"]) == 2


def test_limits_of_query_and_document(reranker: tuple[ServerProcess, Any]) -> None:
    server, model = reranker
    body = {"query": "w1 w2 w3 w4", "documents": ["w5 w6 w7 w8"], "max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    found = post(server, "/rerank", **body)["results"][0]["relevance_score"]
    assert found == pytest.approx(pair_score(model, "w1 w2", "w5 w6 w7"), abs=1e-5)


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/score", "queries", {}),
        ("/score", "text_1", {"text_1": "w1"}),
        ("/score", "queries", {"queries": "w1", "documents": "w1", "items": "w1"}),
        ("/score", "text_2", {"text_1": "w1", "text_2": []}),
        ("/score", "text_2", {"text_1": "w1", "text_2": [3]}),
        ("/score", "text_2", {"text_1": "w1", "text_2": " ".join(WORDS[:70])}),
        ("/score", "instruction", {"text_1": "w1", "text_2": "w2", "instruction": "x"}),
        ("/rerank", "instruction", {"query": "w1", "documents": ["w2"], "instruction": "x"}),
        ("/rerank", "chat_template_kwargs", {"query": "w1", "documents": ["w2"], "chat_template_kwargs": {"a": 1}}),
        ("/score", "top_n", {"text_1": "w1", "text_2": "w2", "top_n": 1}),
        ("/rerank", "query", {"documents": ["w1"]}),
        ("/rerank", "query", {"query": ["w1", "w2"], "documents": ["w1"]}),
        ("/rerank", "documents", {"query": "w1", "documents": []}),
        ("/rerank", "documents", {"query": "w1", "documents": ["w1", ""]}),
        ("/rerank", "top_n", {"query": "w1", "documents": ["w1"], "top_n": -1}),
        ("/rerank", "max_tokens_per_doc", {"query": "w1", "documents": ["w1"], "max_tokens_per_doc": -1}),
    ],
)
def test_bad_pairs_are_named(reranker: tuple[ServerProcess, Any], path: str, field: str, body: dict[str, Any]) -> None:
    assert refused(reranker[0], path, **body)["param"] == field


# A server that generates


def test_a_generating_server_says_that_it_makes_no_vectors(demo_server: ServerProcess) -> None:
    for path, body in [
        ("/v1/embeddings", {"input": "Hello"}),
        ("/pooling", {"input": "Hello"}),
        ("/classify", {"input": "Hello"}),
        ("/score", {"text_1": "Hello", "text_2": "Hello"}),
        ("/rerank", {"query": "Hello", "documents": ["Hello"]}),
        ("/v2/embed", {"texts": ["Hello"]}),
    ]:
        assert "runner=pooling" in refused(demo_server, path, **body)["message"]
    assert post(demo_server, "/v1/completions", prompt="Hello", max_tokens=2)["choices"]


def test_a_batch_of_embeddings(embedder: tuple[ServerProcess, Any]) -> None:
    server, _ = embedder
    bodies = [{"input": text} for text in (TEXTS[0], TEXTS[1], TEXTS[2:])]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": body} for n, body in enumerate(bodies)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        assert wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id is not None, done
        answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    for answer in answers:
        direct = post(server, "/v1/embeddings", **bodies[int(answer["custom_id"])])
        given = answer["response"]["body"]["data"]
        vectors = [[one["embedding"] for one in data] for data in (given, direct["data"])]
        np.testing.assert_allclose(vectors[0], vectors[1], rtol=1e-4, atol=1e-5)
    assert len(answers) == 3


def test_a_server_that_compares_token_by_token(tmp_path: Path) -> None:
    """ColBERT: markers and masks for scores, texts as they are for vectors."""
    model = checkpoints.make("BertModel", tmp_path)
    linear = torch.nn.Linear(48, 12).requires_grad_(False)
    sentence_transformers(tmp_path, "Dense", dense=[linear], kinds="pylate.models.Dense", activation="Identity")
    config = {"query_prefix": "w50", "document_prefix": "w51", "query_length": 8, "attend_to_expansion_tokens": True}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"mask_token": "w52"}')

    def vectors(ids: list[int]) -> torch.Tensor:
        return torch.nn.functional.normalize(linear(checkpoints.states(model, ids)), dim=1)

    def word_ids(text: str) -> list[int]:
        return [8 + WORDS.index(word) for word in text.split()]

    marker, document_marker, mask = word_ids("w50 w51 w52")
    query = [2, marker, *word_ids(TEXTS[0]), 3]
    query += [mask] * (8 - len(query))
    of_documents = [vectors([2, document_marker, *word_ids(text), 3]) for text in TEXTS]
    wanted = [float((vectors(query) @ one.T).amax(1).sum()) for one in of_documents]
    with serve(tmp_path) as server:
        scores = post(server, "/v1/score", queries=TEXTS[0], documents=TEXTS)
        assert [item["score"] for item in scores["data"]] == pytest.approx(wanted, abs=1e-4)
        ranked = post(server, "/v1/rerank", query=TEXTS[0], documents=TEXTS, top_n=2)["results"]
        assert [item["index"] for item in ranked] == sorted(range(4), key=lambda i: -wanted[i])[:2]
        [found] = post(server, "/pooling", input=TEXTS[1])["data"]
        assert np.abs(np.array(found["data"]) - vectors([2, *word_ids(TEXTS[1]), 3]).numpy()).max() < 1e-4
        assert "token_embed" in refused(server, "/v1/embeddings", input=TEXTS[1])["message"]


def test_a_server_of_dense_and_sparse_vectors(tmp_path: Path) -> None:
    """BGE-M3: each task by its name."""
    from safetensors.torch import load_file, save_file

    model = checkpoints.make("XLMRobertaModel", tmp_path)
    weights = torch.nn.Linear(48, 1).requires_grad_(False)
    heads = {"colbert_linear": torch.nn.Linear(48, 48), "sparse_linear": weights}
    added = {f"{name}.{key}": one.detach() for name, m in heads.items() for key, one in m.named_parameters()}
    save_file({**load_file(tmp_path / "model.safetensors"), **added}, tmp_path / "model.safetensors")
    overrides = json.dumps({"architectures": ["BgeM3EmbeddingModel"], "bos_token_id": 2, "eos_token_id": 3})
    ids = [2, *(8 + WORDS.index(word) for word in TEXTS[2].split()), 3]
    lexical = weights(checkpoints.states(model, ids)).relu()[1:-1, 0].tolist()
    with serve(tmp_path, "--hf-overrides", overrides) as server:
        [found] = post(server, "/pooling", input=TEXTS[2], task="sparse_embed")["data"]
        assert found["object"] == "pooling"
        wanted = {token: weight for token, weight in zip(ids[1:-1], lexical, strict=True) if weight > 0}
        told = dict(zip(found["data"]["indices"], found["data"]["values"], strict=True))
        assert told == pytest.approx(wanted, abs=1e-4)
        assert wanted
        [by_token] = post(server, "/pooling", input=TEXTS[2], task="token_classify")["data"]
        assert np.array(by_token["data"])[:, 0] == pytest.approx(lexical, abs=1e-4)
        assert len(post(server, "/pooling", input=TEXTS[2], task="token_embed")["data"][0]["data"]) == len(ids) - 1
        assert len(post(server, "/v1/embeddings", input=TEXTS[2])["data"][0]["embedding"]) == 48
        body = {"input": TEXTS[2], "task": "sparse_embed", "encoding_format": "base64"}
        assert refused(server, "/pooling", **body)["param"] == "encoding_format"
