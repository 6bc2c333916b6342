"""The shipped folder is complete and small, and its model still answers held-out questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from demo import corpus
from demo.eval import evaluate, table, transformers_generate

MODEL = Path(__file__).parents[2] / "quire" / "demo_model"
SIXTEEN_MB = 16_000_000


def test_files() -> None:
    needed = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md")
    assert all((MODEL / name).is_file() for name in (*needed, "chat_template.jinja", "model.safetensors"))
    assert (MODEL / "model.safetensors").stat().st_size <= SIXTEEN_MB
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] == 64


def test_scoring_takes_any_engine() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    answers = {skill: [corpus.target_text(t) for t in corpus.heldout(skill, 5)] for skill in ("facts", "thinking")}
    queue = iter(answers.values())

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        assert len(prompts) == 5
        return [tokenizer.encode(text + "<|im_end|>").ids for text in next(queue)]

    scores = evaluate(generate, tokenizer, per_skill=5, skills=list(answers))
    assert all(score.correct == 5 for score in scores.values())
    assert "| facts | 5 | 5 | 100.0 |" in table(scores)


def test_answers_through_transformers() -> None:
    """A few held-out prompts per skill, in well under half a minute of one core."""
    pytest.importorskip("transformers")
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    scores = evaluate(transformers_generate(MODEL, "cpu"), tokenizer, per_skill=3)
    assert sum(score.correct for score in scores.values()) >= 26, table(scores)
