"""Vectors against transformers: same checkpoint, same tokens, through the whole engine, in one step or many."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams
from tests.pooling import checkpoints
from tests.pooling.checkpoints import random_prompts, sentence_transformers, states

LENGTHS = [1, 33, 2, 64, 17, 17, 5, 40, 33, 9, 3, 64]  # with their neighbours' length, and without
RAW = PoolingParams(use_activation=False)
POOL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls_token": lambda x: x[0],
    "mean_tokens": lambda x: x.mean(0),
    "max_tokens": lambda x: x.max(0).values,
    "lasttoken": lambda x: x[-1],
}


def ids(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def vectors(folder: Path, prompts: list[list[int]], **options: Any) -> list[torch.Tensor]:
    """Of the prompts in two orders, which must agree."""
    with LLM(str(folder), device="cpu", dtype="float32", **options) as llm:
        found = [torch.tensor(o.outputs.data) for o in llm.encode(ids(prompts), RAW, use_tqdm=False)]
        again = llm.encode(ids(prompts[::-1]), RAW, use_tqdm=False)
        for first, second in zip(found, reversed(again), strict=True):
            assert np.abs(first.numpy() - second.outputs.data).max() < 1e-4
    return found


def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert torch.stack(expected).std() > 0.05, "the reference says the same about every prompt"
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("mode", list(POOL))
@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel", "XLMRobertaModel"])
def test_encoders(architecture: str, mode: str, tmp_path: Path) -> None:
    model = checkpoints.make(architecture, tmp_path)
    sentence_transformers(tmp_path, "Pooling", **{f"pooling_mode_{mode}": True})
    prompts = random_prompts(0, LENGTHS)
    found = vectors(tmp_path, prompts, max_num_seqs=5, max_num_batched_tokens=80)
    check(found, [POOL[mode](states(model, prompt)) for prompt in prompts])


@pytest.mark.parametrize("mode", list(POOL))
@pytest.mark.parametrize("chunk", [0, 7])
def test_decoders_in_chunks_and_whole(mode: str, chunk: int, tmp_path: Path) -> None:
    """Whatever a prompt is cut into. Half of them begin alike: what is cached has no states to be pooled."""
    model = checkpoints.make("Qwen3ForCausalLM", tmp_path)
    sentence_transformers(tmp_path, "Pooling", **{f"pooling_mode_{mode}": True})
    prompts = random_prompts(1, [40, 1, 70, 23, 100])
    prompts += [[*prompts[2][:48], *prompt] for prompt in prompts[:4]]
    found = vectors(tmp_path, prompts, max_prefill_chunk=chunk, max_num_seqs=4, max_num_batched_tokens=64)
    check(found, [POOL[mode](states(model, prompt)) for prompt in prompts])


@pytest.mark.parametrize("architecture", ["BertModel", "LlamaForCausalLM"])
def test_a_vector_of_every_token(architecture: str, tmp_path: Path) -> None:
    model = checkpoints.make(architecture, tmp_path)
    prompts = random_prompts(2, [30, 1, 64, 12])
    options = {"max_num_batched_tokens": 70, "max_num_seqs": 3}
    with LLM(str(tmp_path), device="cpu", dtype="float32", runner="pooling", **options) as llm:
        outputs = llm.encode(ids(prompts), RAW, pooling_task="token_embed", use_tqdm=False)
        both = llm.encode(
            ids(prompts), [PoolingParams(task=t, use_activation=False) for t in ("embed", "token_embed") * 2],
            use_tqdm=False,
        )  # fmt: skip
    for prompt, output in zip(prompts, outputs, strict=True):
        check(list(torch.tensor(output.outputs.data)), list(states(model, prompt)))
    assert [o.outputs.data.ndim for o in both] == [1, 2, 1, 2]
    last = -1 if architecture.startswith("Llama") else 0
    for alone, output in zip(both, outputs, strict=True):
        whole = alone.outputs.data if alone.outputs.data.ndim == 1 else alone.outputs.data[last]
        assert np.abs(whole - output.outputs.data[last]).max() < 1e-4


def test_a_decoder_without_a_prefix_in_its_checkpoint(tmp_path: Path) -> None:
    """As Qwen3-Embedding is stored: the trunk alone, called a ForCausalLM."""
    model = checkpoints.make("Qwen3Model", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    sentence_transformers(tmp_path, "Pooling", "Normalize", pooling_mode_lasttoken=True)
    prompts = random_prompts(3, [30, 3])
    with LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        found = [torch.tensor(o.outputs.embedding) for o in llm.embed(ids(prompts), use_tqdm=False)]
    expected = [torch.nn.functional.normalize(states(model, p)[-1], dim=0) for p in prompts]
    check(found, expected)


def test_dense_layers_behind_the_pooling(tmp_path: Path) -> None:
    model = checkpoints.make("BertModel", tmp_path)
    dense = [torch.nn.Linear(48, 20), torch.nn.Linear(20, 10)]
    sentence_transformers(
        tmp_path, "Pooling", "Dense", "Dense", "Normalize", dense=dense, pooling_mode="mean", embedding_dimension=48
    )
    prompts = random_prompts(4, [30, 3, 9])
    with LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        found = [torch.tensor(o.outputs.embedding) for o in llm.embed(ids(prompts), use_tqdm=False)]
    x = torch.stack([states(model, p).mean(0) for p in prompts])
    with torch.inference_mode():
        for layer in dense:
            x = torch.tanh(layer(x))
    check(found, list(torch.nn.functional.normalize(x, dim=1)))


@pytest.mark.parametrize(
    ("architecture", "labels"),
    [
        ("BertForSequenceClassification", 3),
        ("RobertaForSequenceClassification", 3),
        ("XLMRobertaForSequenceClassification", 1),
        ("Qwen3ForSequenceClassification", 4),
        ("LlamaForSequenceClassification", 1),
        ("GPT2ForSequenceClassification", 2),
        ("Gemma3TextForSequenceClassification", 3),
    ],
)
def test_classes(architecture: str, labels: int, tmp_path: Path) -> None:
    model = checkpoints.make(architecture, tmp_path, num_labels=labels)
    prompts = random_prompts(5, [30, 1, 64, 12])
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_num_batched_tokens=100) as llm:
        found = [torch.tensor(o.outputs.probs) for o in llm.classify(ids(prompts), use_tqdm=False)]
        raw = [torch.tensor(o.outputs.data) for o in llm.encode(ids(prompts), RAW, use_tqdm=False)]
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    check(raw, logits)
    check(found, [x.sigmoid() if labels == 1 else x.softmax(0) for x in logits])


@pytest.mark.parametrize("architecture", ["BertForTokenClassification", "XLMRobertaForTokenClassification"])
def test_classes_of_tokens(architecture: str, tmp_path: Path) -> None:
    model = checkpoints.make(architecture, tmp_path, num_labels=5)
    prompts = random_prompts(6, [30, 1, 64])
    with LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        outputs = llm.encode(ids(prompts), use_tqdm=False)
        with pytest.raises(ValueError, match="token_classify"):
            llm.classify(ids(prompts), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            check(list(torch.tensor(output.outputs.data)), list(model(torch.tensor([prompt])).logits[0].softmax(1)))


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "RobertaForSequenceClassification"])
def test_a_cross_encoder_reads_pairs(architecture: str, tmp_path: Path) -> None:
    """Token types and all; a long document is cut, the query stays whole."""
    model = checkpoints.make(architecture, tmp_path, num_labels=1)
    tokenizer = transformers_tokenizer(tmp_path)
    query = " ".join(checkpoints.WORDS[:7])
    documents = [" ".join(checkpoints.WORDS[i : i + n]) for i, n in ((3, 1), (9, 20), (30, 40), (5, 90))]
    context = 64 if architecture.startswith("Roberta") else 66
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=context) as llm:
        outputs = llm.score(query, documents, use_tqdm=False, truncate_prompt_tokens=-1)
        with pytest.raises(ValueError, match="context"):
            llm.score(query, documents, use_tqdm=False)
    for document, output in zip(documents, outputs, strict=True):
        options = {"truncation": "longest_first", "max_length": context, "return_token_type_ids": True}
        pair = tokenizer(query, document, return_tensors="pt", **options)
        assert pair.input_ids[0].tolist() == output.prompt_token_ids
        types = {} if architecture.startswith("Roberta") else {"token_type_ids": pair.token_type_ids}
        assert not types or types["token_type_ids"].any()
        with torch.inference_mode():
            expected = model(pair.input_ids, **types).logits[0, 0].sigmoid()
        assert abs(float(expected) - output.outputs.score) < 1e-5


def test_a_generating_model_that_reranks(tmp_path: Path) -> None:
    """As Qwen3-Reranker: how much likelier "yes" is than "no" after a question in words."""
    model = checkpoints.make("Qwen3ForCausalLM", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'query' %}w1 {{ m.content }} {% endif %}"
        "{% if m.role == 'document' %}w2 {{ m.content }} w3{% endif %}{% endfor %}"
    )
    overrides = {"classifier_from_token": ["w8", "w9"]}
    no, yes = (checkpoints.WORDS.index(word) + 8 for word in ("w8", "w9"))
    with LLM(str(tmp_path), device="cpu", dtype="float32", runner="pooling", hf_overrides=overrides) as llm:
        outputs = llm.score("w20 w21", ["w30 w31", "w40"], use_tqdm=False)
    for text, output in zip(["w1 w20 w21 w2 w30 w31 w3", "w1 w20 w21 w2 w40 w3"], outputs, strict=True):
        tokens = [checkpoints.WORDS.index(word) + 8 for word in text.split()]
        assert tokens == output.prompt_token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        assert abs(float(logits[[no, yes]].softmax(0)[1]) - output.outputs.score) < 1e-5


def test_a_context_longer_than_the_table_of_positions_is_refused(tmp_path: Path) -> None:
    """RoBERTa's first token has the position behind the padding token's id."""
    checkpoints.make("RobertaModel", tmp_path, pad_token_id=1)
    prompt = random_prompts(7, [64])
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=64) as llm:
        assert len(llm.embed(ids(prompt), use_tqdm=False)) == 1
    for options in ({"max_model_len": 65}, {"max_model_len": 65, "hf_overrides": {"model_type": "other"}}):
        with pytest.raises(ValueError, match=r"max_model_len.*6[45]"):
            LLM(str(tmp_path), device="cpu", dtype="float32", **options)


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>")
