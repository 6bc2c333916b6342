"""Vectors that are made by more than pooling: of words (SPLADE), of tokens (ColBERT), all at once (BGE-M3), rewards."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from quire import LLM, PoolingParams
from tests.pooling import checkpoints, encoders
from tests.pooling.checkpoints import random_prompts, save_tokenizer, sentence_transformers
from tests.pooling.encoders import states

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 80}
PROMPTS = random_prompts(0, [33, 1, 60, 17, 5])
GIVEN: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
RAW = PoolingParams(use_activation=False)


def rewrite(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{name: one.detach().contiguous() for name, one in tensors.items()}}, file)


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


# -- SPLADE --------------------------------------------------------------------------------------------------------

SPLADE = {
    "max": ({"pooling_strategy": "max"}, lambda x: x.relu().log1p().amax(0)),
    "sum": ({"pooling_strategy": "sum", "activation_function": "relu"}, lambda x: x.relu().log1p().sum(0)),
    "twice": ({"activation_function": "log1p_relu"}, lambda x: x.relu().log1p().log1p().amax(0)),
}


@pytest.mark.parametrize("case", ["bert", "roberta", "modernbert-biases", "distilbert"])
@pytest.mark.parametrize("how", SPLADE)
def test_weights_of_words(how: str, case: str, tmp_path: Path) -> None:
    """sentence-transformers' SpladePooling, dense and sparse."""
    model = encoders.make(case, tmp_path, "ForMaskedLM")
    config, expected = SPLADE[how]
    sentence_transformers(tmp_path, "SpladePooling", **config)
    with LLM(str(tmp_path), max_model_len=60, **OPTIONS) as llm:
        dense = llm.embed(GIVEN, use_tqdm=False)
        sparse = llm.encode(GIVEN, pooling_task="sparse_embed", use_tqdm=False)
        [score] = llm.score("w1 w2", "w2 w3 w4", use_tqdm=False)
        with pytest.raises(ValueError, match="token_embed"):
            llm.encode(GIVEN, pooling_task="token_embed", use_tqdm=False)
    for prompt, one, few in zip(PROMPTS, dense, sparse, strict=True):
        wanted = expected(logits(model, prompt))
        found = torch.tensor(one.outputs.embedding)
        assert (found - wanted).abs().max() < 1e-4
        assert wanted.std() > 0.05
        assert few.outputs.indices is not None
        assert few.outputs.indices.tolist() == found.nonzero()[:, 0].tolist()
        assert torch.equal(torch.tensor(few.outputs.data), found[found > 0])
    pair = (expected(logits(model, [2, *ids, 3])) for ids in ([9, 10], [10, 11, 12]))
    assert score.outputs.score == pytest.approx(float(torch.dot(*pair)), abs=1e-3)


def test_splade_by_the_architecture(tmp_path: Path) -> None:
    model = encoders.make("bert", tmp_path, "ForMaskedLM")
    overrides = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
    with LLM(str(tmp_path), hf_overrides=overrides, **OPTIONS) as llm:
        [found] = llm.embed(GIVEN[:1], use_tqdm=False)
    wanted = SPLADE["max"][1](logits(model, PROMPTS[0]))
    assert (torch.tensor(found.outputs.embedding) - wanted).abs().max() < 1e-4


# -- ColBERT -------------------------------------------------------------------------------------------------------

QUERY, DOCUMENTS = "w1 w2 w3", ["w3 w9 , w4", "w5", "w1 , w2 w3 w6 w7 w8 w20 w21"]


def add_words(folder: Path, **ids: str) -> None:
    """Other names for tokens of the vocabulary."""
    text = (folder / "tokenizer.json").read_text()
    for old, new in ids.items():
        text = text.replace(f'"{old}"', json.dumps(new))
    (folder / "tokenizer.json").write_text(text)
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": "[MASK]"}))


def word_ids(text: str) -> list[int]:
    return [8 + (40 if word == "," else int(word[1:])) for word in text.split()]


def late_states(model: Any, ids: list[int], num_keys: int) -> torch.Tensor:
    mask = (torch.arange(len(ids)) < num_keys).long()[None]
    with torch.inference_mode():
        found: torch.Tensor = model.base_model(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
    return found


def expected_scores(
    model: Any, linear: torch.nn.Linear, *, length: int, most: int, attends: bool, expands: bool, skips: bool
) -> list[float]:
    """As ColBERT computes them, one text after the other."""
    query_marker, document_marker, mask = (checkpoints.WORDS.index(word) + 8 for word in ("w41", "w42", "w43"))
    ids = [2, query_marker, *word_ids(QUERY), 3]
    filled = ids + [mask] * (length - len(ids) if expands else 0)
    keys = len(filled) if attends else len(ids)
    query = normalize(linear(late_states(model, filled, keys)), dim=1)
    scores = []
    for document in DOCUMENTS:
        ids = [2, document_marker, *word_ids(document)[: most - 3], 3]
        vectors = normalize(linear(late_states(model, ids, len(ids))), dim=1)
        if skips:
            vectors = vectors[torch.tensor(ids) != checkpoints.WORDS.index("w40") + 8]
        scores.append(float((query @ vectors.T).amax(1).sum().detach()))
    return scores


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("case", ["bert", "modernbert"])
def test_late_interaction_as_pylate_keeps_it(case: str, attends: bool, tmp_path: Path) -> None:
    # Windows in which there is something to be seen from anywhere.
    model = encoders.make(case, tmp_path, **({"local_attention": 16} if case == "modernbert" else {}))
    linear = torch.nn.Linear(48, 16).requires_grad_(False)
    sentence_transformers(tmp_path, "Dense", dense=[linear], kinds="pylate.models.Dense", activation="Identity")
    add_words(tmp_path, w40=",", w41="[Q] ", w42="[D] ", w43="[MASK]")
    config = {
        "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12, "document_length": 9,
        "attend_to_expansion_tokens": attends, "skiplist_words": list(string.punctuation),
        "similarity_fn_name": "MaxSim",
    }  # fmt: skip
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    with LLM(str(tmp_path), max_model_len=64, **OPTIONS) as llm:
        found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        vectors = llm.encode(GIVEN, use_tqdm=False)
        with pytest.raises(ValueError, match="token_embed"):
            llm.embed(GIVEN, use_tqdm=False)
    wanted = expected_scores(model, linear, length=12, most=9, attends=attends, expands=True, skips=True)
    assert found == pytest.approx(wanted, abs=1e-3)
    assert max(wanted) - min(wanted) > 0.1
    for prompt, output in zip(PROMPTS, vectors, strict=True):
        with torch.inference_mode():
            assert (
                torch.tensor(output.outputs.data) - normalize(linear(states(model, prompt)), dim=1)
            ).abs().max() < 1e-4


def test_late_interaction_as_colbert_keeps_it(tmp_path: Path) -> None:
    model = encoders.make("bert", tmp_path)
    linear = torch.nn.Linear(48, 20, bias=False).requires_grad_(False)
    add_tensors(tmp_path, {"linear.weight": linear.weight})
    rewrite(tmp_path, architectures=["HF_ColBERT"])
    add_words(tmp_path, w40=",", w41="[unused0]", w42="[unused1]", w43="[MASK]")
    metadata = {"dim": 20, "query_maxlen": 10, "doc_maxlen": 30, "mask_punctuation": False, "similarity": "cosine"}
    (tmp_path / "artifact.metadata").write_text(json.dumps(metadata))
    with LLM(str(tmp_path), max_model_len=64, **OPTIONS) as llm:
        found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    wanted = expected_scores(model, linear, length=10, most=30, attends=False, expands=True, skips=False)
    assert found == pytest.approx(wanted, abs=1e-3)
    (tmp_path / "artifact.metadata").write_text(json.dumps({**metadata, "similarity": "l2"}))
    with pytest.raises(ValueError, match="similarity='l2' is not supported"):
        LLM(str(tmp_path), max_model_len=64, **OPTIONS)


# -- BGE-M3 --------------------------------------------------------------------------------------------------------


def test_three_kinds_of_vectors_at_once(tmp_path: Path) -> None:
    model = encoders.make("xlm_roberta", tmp_path)
    of_tokens, weights = torch.nn.Linear(48, 48), torch.nn.Linear(48, 1)
    named = {"colbert_linear": of_tokens, "sparse_linear": weights}
    add_tensors(tmp_path, {f"{name}.{key}": one for name, m in named.items() for key, one in m.named_parameters()})
    rewrite(tmp_path, architectures=["BgeM3EmbeddingModel"])
    tasks = ["embed", "token_embed", "token_classify", "sparse_embed"]
    prompts = [[2, *prompt[:40], *prompt[:5], 3] for prompt in PROMPTS]
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts for _ in tasks]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        made = llm.encode(given, [PoolingParams(task=task) for task in tasks] * len(prompts), use_tqdm=False)
        [score] = llm.score("w1", "w2 w3", use_tqdm=False)
    for i, prompt in enumerate(prompts):
        dense, colbert, by_token, sparse = (output.outputs for output in made[4 * i : 4 * i + 4])
        x = states(model, prompt)
        with torch.inference_mode():
            lexical = weights(x).relu()[:, 0]
            assert (torch.tensor(dense.data) - normalize(x[0], dim=0)).abs().max() < 1e-4
            assert (torch.tensor(colbert.data) - normalize(of_tokens(x[1:]), dim=1)).abs().max() < 1e-4
        assert (torch.tensor(by_token.data)[:, 0] - lexical[1:-1]).abs().max() < 1e-4
        wanted: dict[int, float] = {}
        for token, weight in list(zip(prompt, lexical.tolist(), strict=True))[1:-1]:
            if weight > 0:
                wanted[token] = max(weight, wanted.get(token, 0.0))
        assert sparse.indices is not None
        assert dict(zip(sparse.indices.tolist(), sparse.data.tolist(), strict=True)) == pytest.approx(wanted, abs=1e-4)
    pair = (states(model, [2, *ids, 3])[0] for ids in ([9], [10, 11]))
    assert score.outputs.score == pytest.approx(float(torch.cosine_similarity(*pair, dim=0)), abs=1e-4)


# -- rewards -------------------------------------------------------------------------------------------------------


def rewarding(folder: Path, architecture: str, labels: int, **config: Any) -> tuple[Any, torch.nn.Module]:
    """Qwen 2 with two layers behind it."""
    model = checkpoints.make("Qwen2ForCausalLM", folder, **config)
    torch.manual_seed(7)
    head = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.ReLU(), torch.nn.Linear(48, labels))
    add_tensors(folder, {f"score.{name}": one for name, one in head.named_parameters()})
    rewrite(folder, architectures=[architecture], num_labels=labels)
    return model, head


def test_a_reward_is_that_of_the_last_token(tmp_path: Path) -> None:
    model, head = rewarding(tmp_path, "Qwen2ForRewardModel", 1)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = llm.classify(GIVEN, use_tqdm=False)
        by_token = llm.encode(GIVEN, pooling_task="token_classify", use_tqdm=False)
    with torch.inference_mode():
        wanted = [head(checkpoints.states(model, prompt)) for prompt in PROMPTS]
    for one, every, expected in zip(found, by_token, wanted, strict=True):
        assert one.outputs.probs == pytest.approx(expected[-1].tolist(), abs=1e-4)
        assert (torch.tensor(every.outputs.data) - expected).abs().max() < 1e-4


def test_rewards_of_steps(tmp_path: Path) -> None:
    model, head = rewarding(tmp_path, "Qwen2ForProcessRewardModel", 2)
    prompts = [[*PROMPTS[0][:9], 77, *PROMPTS[0][9:], 77], [77], PROMPTS[3]]
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(str(tmp_path), pooler_config={"pooling_type": "STEP", "step_tag_id": 77}, **OPTIONS) as llm:
        found = llm.encode(given, use_tqdm=False)
    for prompt, output in zip(prompts, found, strict=True):
        with torch.inference_mode():
            wanted = head(checkpoints.states(model, prompt)).softmax(1)[torch.tensor(prompt) == 77]
        assert output.outputs.data.shape == wanted.shape
        assert not wanted.numel() or (torch.tensor(output.outputs.data) - wanted).abs().max() < 1e-4


def test_steps_judged_by_a_models_own_words(tmp_path: Path) -> None:
    """As math-shepherd does: how likely two tokens are, behind every step."""
    model = checkpoints.make("MistralForCausalLM", tmp_path)
    prompt = [*PROMPTS[0], 77, 12, 77]
    options = {"pooling_type": "STEP", "step_tag_id": 77, "returned_token_ids": [20, 21]}
    given: Any = [{"prompt_token_ids": prompt}]
    with LLM(str(tmp_path), runner="pooling", pooler_config=options, **OPTIONS) as llm:
        [found] = llm.encode(given, use_tqdm=False)
    wanted = logits(model, prompt)[torch.tensor(prompt) == 77][:, [20, 21]].softmax(1)
    assert (torch.tensor(found.outputs.data) - wanted).abs().max() < 1e-4


# -- decoders that look both ways ----------------------------------------------------------------------------------

BOTH_WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2Model", {"is_causal": False}, {}),
    "qwen2-windows": (
        "Qwen2Model",
        {"is_causal": False, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        {},
    ),
    "llama": ("LlamaModel", {"is_causal": False}, {"architectures": ["LlamaBidirectionalModel"], "pooling": "avg"}),
    "gemma3": (
        "Gemma3TextModel",
        {"use_bidirectional_attention": True, "sliding_window": 16, "query_pre_attn_scalar": 12,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BOTH_WAYS)
def test_a_decoder_that_looks_both_ways(case: str, tmp_path: Path) -> None:
    architecture, config, changes = BOTH_WAYS[case]
    model = checkpoints.make(architecture, tmp_path, **config)
    if changes:
        rewrite(tmp_path, **{"is_causal": None, **changes})
    sentence_transformers(tmp_path, "Pooling", pooling_mode="mean") if case != "llama" else None
    with LLM(str(tmp_path), max_model_len=64, **OPTIONS) as llm:
        found = llm.encode(GIVEN, RAW, use_tqdm=False)
    both = torch.stack([checkpoints.states(model, prompt).mean(0) for prompt in PROMPTS])
    assert (torch.tensor(np.stack([one.outputs.data for one in found])) - both).abs().max() < 1e-4
    key = "use_bidirectional_attention" if "use_bidirectional_attention" in config else "is_causal"
    with torch.inference_mode():
        setattr(model.config, key, key == "is_causal")
        for layer in model.layers:
            layer.self_attn.is_causal = True
        one_way = torch.stack([checkpoints.states(model, prompt).mean(0) for prompt in PROMPTS])
    assert (one_way - both).abs().max() > 0.02, "the reference does not look both ways"
    with pytest.raises(ValueError, match="not supported for generating"):
        LLM(str(tmp_path), runner="generate", max_model_len=64, **OPTIONS)


@pytest.mark.parametrize("architecture", ["Qwen3ForTokenClassification", "LlamaForTokenClassification"])
def test_classes_of_a_decoders_tokens(architecture: str, tmp_path: Path) -> None:
    model = checkpoints.make(architecture, tmp_path, num_labels=3)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = llm.encode(GIVEN, RAW, use_tqdm=False)
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert (torch.tensor(output.outputs.data) - logits(model, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize("mode", ["weightedmean", "mean_sqrt_len_tokens"])
def test_other_means(mode: str, tmp_path: Path) -> None:
    model = checkpoints.make("Qwen3Model", tmp_path)
    sentence_transformers(tmp_path, "Pooling", pooling_mode=mode)
    with LLM(str(tmp_path), max_prefill_chunk=7, **OPTIONS) as llm:
        found = llm.encode(GIVEN, RAW, use_tqdm=False)
    for prompt, output in zip(PROMPTS, found, strict=True):
        x = checkpoints.states(model, prompt)
        places = torch.arange(1, len(x) + 1)[:, None]
        wanted = (x * places).sum(0) / places.sum() if mode == "weightedmean" else x.sum(0) / len(x) ** 0.5
        assert (torch.tensor(output.outputs.data) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "wanted"), [("dot", torch.dot), ("euclidean", lambda a, b: -(a - b).norm())])
def test_scores_as_the_models_files_say(name: str, wanted: Any, tmp_path: Path) -> None:
    model = encoders.make("bert", tmp_path)
    sentence_transformers(tmp_path, "Pooling", pooling_mode="cls")
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": name}))
    save_tokenizer(tmp_path, pairs="bert")
    with LLM(str(tmp_path), **OPTIONS) as llm:
        [found] = llm.score("w1", "w2", use_tqdm=False)
    pair = (states(model, [2, *ids, 3])[0] for ids in ([9], [10]))
    assert found.outputs.score == pytest.approx(float(wanted(*pair)), abs=1e-3)
