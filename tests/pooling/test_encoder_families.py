"""Every encoder family against transformers: states of all tokens, classes of texts and of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import LLM, PoolingParams
from tests.pooling import encoders
from tests.pooling.checkpoints import random_prompts
from tests.pooling.encoders import CASES, states

RAW = PoolingParams(use_activation=False)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 100, "max_model_len": 64}
PROMPTS = random_prompts(0, [33, 1, 64, 17, 16, 2])
GIVEN = [{"prompt_token_ids": prompt} for prompt in PROMPTS]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    assert expected.std() > 0.05, "the reference says the same about everything"
    return (found - expected).abs().max().item()


def of_tokens(folder: Path) -> list[torch.Tensor]:
    with LLM(str(folder), **OPTIONS) as llm:  # type: ignore[arg-type]
        outputs = llm.encode(GIVEN, RAW, pooling_task="token_embed", use_tqdm=False)
        return [torch.tensor(output.outputs.data) for output in outputs]


@pytest.mark.parametrize("case", CASES)
def test_states_of_tokens(case: str, tmp_path: Path) -> None:
    model = encoders.make(case, tmp_path)
    for prompt, found in zip(PROMPTS, of_tokens(tmp_path), strict=True):
        assert difference(found, states(model, prompt)) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_classes_of_texts(case: str, tmp_path: Path) -> None:
    model = encoders.make(case, tmp_path, "ForSequenceClassification", num_labels=3)
    with LLM(str(tmp_path), **OPTIONS) as llm:  # type: ignore[arg-type]
        outputs = llm.encode(GIVEN, RAW, pooling_task="classify", use_tqdm=False)
    found = torch.stack([torch.tensor(output.outputs.data) for output in outputs])
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
    assert difference(found, expected) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_classes_of_tokens(case: str, tmp_path: Path) -> None:
    model = encoders.make(case, tmp_path, "ForTokenClassification", num_labels=4)
    with LLM(str(tmp_path), **OPTIONS) as llm:  # type: ignore[arg-type]
        outputs = llm.encode(GIVEN, RAW, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        assert difference(torch.tensor(output.outputs.data), expected) < 1e-4
