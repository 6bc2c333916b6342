"""What a model is run for, and how it pools: read from its files, overridden by options, refused if it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.pooler import PoolerConfig
from quire.config.resolve import resolve
from quire.foundation.errors import ConfigError, InputError
from quire.types.pooling import PoolingParams
from tests.pooling.checkpoints import sentence_transformers

SIZES = {"vocab_size": 100, "hidden_size": 32, "max_position_embeddings": 128}


def pooler(
    folder: Path, architecture: str, options: dict[str, Any] | None = None, **config: Any
) -> PoolerConfig | None:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **SIZES, **config}))
    return resolve(EngineConfig.from_flat(model=str(folder), device="cpu", **(options or {}))).pooler


@pytest.mark.parametrize(
    ("architecture", "options", "kind"),
    [
        ("Qwen3ForCausalLM", {}, None),
        ("Qwen3ForCausalLM", {"runner": "pooling"}, "embed"),
        ("Qwen3ForCausalLM", {"convert": "embed"}, "embed"),
        ("Qwen3ForCausalLM", {"convert": "classify"}, "classify"),
        ("Qwen3ForCausalLM", {"runner": "generate", "convert": "none"}, None),
        ("Qwen3Model", {}, "embed"),
        ("Qwen3ForSequenceClassification", {}, "classify"),
        ("BertModel", {}, "embed"),
        ("BertForMaskedLM", {}, "embed"),
        ("BertForSequenceClassification", {}, "classify"),
        ("BertForSequenceClassification", {"convert": "embed"}, "embed"),
        ("BertForTokenClassification", {}, "classify"),
        ("HF_ColBERT", {}, "embed"),
        ("GPT2Model", {}, "embed"),
        ("Gemma3TextModel", {}, "embed"),
        ("MistralModel", {}, "embed"),
        ("Phi3ForSequenceClassification", {}, "classify"),
        ("Qwen2ForRewardModel", {}, "classify"),
        ("InternLM2ForRewardModel", {}, "classify"),
        ("LlamaBidirectionalModel", {}, "embed"),
        ("LlamaBidirectionalForSequenceClassification", {}, "classify"),
    ],
)
def test_what_a_model_is_run_for(architecture: str, options: dict[str, Any], kind: str | None, tmp_path: Path) -> None:
    found = pooler(tmp_path, architecture, options)
    assert (found and found.kind) == kind


def test_modules_make_an_embedder_of_a_decoder(tmp_path: Path) -> None:
    sentence_transformers(tmp_path, "Pooling", "Normalize", pooling_mode_lasttoken=True)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    found = pooler(tmp_path, "Qwen3ForCausalLM")
    assert found is not None
    assert (found.kind, found.mode, found.activation, found.max_tokens) == ("embed", "last", "normalize", 64)
    assert pooler(tmp_path, "Qwen3ForCausalLM", {"runner": "generate"}) is None
    asked = pooler(tmp_path, "Qwen3ForCausalLM", {"pooler_config": {"pooling_type": "MEAN", "use_activation": False}})
    assert asked is not None
    assert (asked.mode, asked.activation) == ("mean", "identity")
    sentence_transformers(tmp_path, "Pooling", pooling_mode="mean")
    plain = pooler(tmp_path, "Qwen3ForCausalLM")
    assert plain is not None
    assert (plain.mode, plain.activation) == ("mean", "identity")


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"id2label": {"0": "a", "1": "b"}}, "softmax"),
        ({}, "softmax"),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"num_labels": 3, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_what_makes_probabilities(config: dict[str, Any], activation: str, tmp_path: Path) -> None:
    found = pooler(tmp_path, "BertForSequenceClassification", **config)
    assert found is not None
    assert found.activation == activation


def test_logits_that_are_divided_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"temperature=0\.2 is not supported"):
        pooler(tmp_path, "LlamaBidirectionalForSequenceClassification", temperature=0.2)
    assert pooler(tmp_path, "LlamaBidirectionalForSequenceClassification", temperature=1.0) is not None


def test_a_reranker_by_its_next_token(tmp_path: Path) -> None:
    """sentence-transformers' word for it."""
    sentence_transformers(tmp_path, "LogitScore")
    (tmp_path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 7, "false_token_id": null}')
    found = pooler(tmp_path, "Qwen3ForCausalLM")
    assert found is not None
    assert (found.kind, found.label_tokens, found.size, found.activation) == ("classify", (7, None), 1, "sigmoid")


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    def refuses(match: str, options: dict[str, Any] | None = None, **config: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            pooler(tmp_path, "BertModel", options, **config)

    refuses("needs runner=pooling", {"runner": "generate", "convert": "embed"})
    refuses("pooling_type must be one of", {"pooler_config": {"pooling_type": "BEST"}})
    refuses("unknown key 'mode'", {"pooler_config": {"mode": "MEAN"}})
    refuses("must hold 2 tokens", classifier_from_token=["yes"])
    refuses("not both tokens", classifier_from_token=["no", "yes"])
    refuses("classifier_pooling must be", {"convert": "classify"}, classifier_pooling="best")
    sentence_transformers(tmp_path, "Pooling", pooling_mode_mean_tokens=True, pooling_mode_max_tokens=True)
    refuses("mean_tokens and max_tokens")
    refuses("step_tag_id", {"pooler_config": {"tok_pooling_type": "STEP"}})
    refuses("tok_pooling_type must be", {"pooler_config": {"tok_pooling_type": "SOME"}})
    sentence_transformers(tmp_path, "SpladePooling", pooling_strategy="mean")
    refuses("pooling_strategy='mean'")
    told = tmp_path / "config_sentence_transformers.json"
    sentence_transformers(tmp_path, "Pooling", pooling_mode="mean")
    told.write_text('{"similarity_fn_name": "hamming"}')
    refuses("similarity_fn_name must be one of")
    told.write_text('{"similarity_fn_name": "MaxSim", "query_length": 0}')
    refuses("query_length must be >= 1")
    told.write_text('{"similarity_fn_name": "MaxSim", "skiplist_words": "."}')
    refuses("skiplist_words must be a list of strings")
    told.unlink()
    sentence_transformers(tmp_path, "WordWeights")
    refuses("WordWeights")
    modules = [{"type": "sentence_transformers.models.Dense", "path": "../elsewhere"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    refuses("no folder beside it")
    for text in ("{", "{}", "[1]"):
        (tmp_path / "modules.json").write_text(text)
        refuses("modules.json")


def test_params_say_what_is_wrong_with_them() -> None:
    for wrong, field in (
        ({"task": "score"}, "task"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"use_activation": 1}, "use_activation"),
    ):
        with pytest.raises(InputError) as caught:
            PoolingParams(**wrong)  # type: ignore[arg-type]
        assert caught.value.param == field


def test_words_that_texts_would_begin_with_are_named(tmp_path: Path) -> None:
    sentence_transformers(tmp_path, "Pooling", pooling_mode="mean")
    told = tmp_path / "config_sentence_transformers.json"
    told.write_text(json.dumps({"prompts": {"query": "query: ", "text": ""}, "default_prompt_name": "query"}))
    assert (found := pooler(tmp_path, "BertModel"))
    assert found.default_prompt == "query"
    notes = resolve(EngineConfig.from_flat(model=str(tmp_path), device="cpu")).notes
    assert any("begin each with 'query: ' (default_prompt_name=query)" in note for note in notes)
    told.write_text(json.dumps({"prompts": {"query": "query: "}, "default_prompt_name": None}))
    assert not resolve(EngineConfig.from_flat(model=str(tmp_path), device="cpu")).notes
    told.write_text(json.dumps({"prompts": {}, "default_prompt_name": "query"}))
    with pytest.raises(ConfigError, match="default_prompt_name='query' is none of prompts"):
        pooler(tmp_path, "BertModel")
