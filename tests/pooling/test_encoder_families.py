"""Every encoder family against transformers: states of all tokens, classes of texts and of tokens."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, PoolingParams
from quire.config.hf_config import hf_config
from quire.foundation.errors import WeightsError
from quire.layers.rotary import rotary_table
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


@pytest.mark.parametrize("case", [case for case in CASES if "-" not in case])
def test_checkpoints_that_do_not_fit(case: str, tmp_path: Path) -> None:
    """One error that lists it all."""
    encoders.make(case, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    inner = sorted(name for name in tensors if re.search(r"layers?\.1\.", name) and tensors[name].dim() == 2)
    missing, misshapen = inner[0], inner[1]
    del tensors[missing]
    tensors[misshapen] = tensors[misshapen][:-1].contiguous()
    tensors["encoder.unheard_of"] = torch.ones(2)
    save_file(tensors, file)
    with pytest.raises(WeightsError) as caught:
        LLM(str(tmp_path), **OPTIONS)  # type: ignore[arg-type]
    for name in (missing, misshapen, "unheard_of"):
        assert name in str(caught.value)


def test_a_table_that_is_stretched_as_gte_does_it() -> None:
    """ "ntk", and its "mixed" form (https://kexue.fm/archives/9706), by their formulas."""
    for mixed in (None, 0.6):
        rope = {"type": "ntk", "factor": 3.0, **({} if mixed is None else {"mixed_b": mixed})}
        config = {"architectures": ["NewModel"], "rope_scaling": rope, "rope_theta": 500}
        table = rotary_table(hf_config(config, {}).values, 16, 40)
        column = torch.arange(8).double()
        if mixed is None:
            frequencies = (500 * 3.0) ** (-column / 8) / 3.0 ** (2 / 16)
        else:
            frequencies = 500 ** (-column / 8) / torch.exp(math.log(3.0) / 8**mixed * (column + 1) ** mixed)
        angles = torch.arange(40).double()[:, None] * frequencies
        assert (table - torch.cat([angles.cos(), angles.sin()], 1)).abs().max() < 1e-5
