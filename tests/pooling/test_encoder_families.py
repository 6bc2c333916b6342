"""Every encoder family against transformers: states of all tokens, classes of texts and of tokens."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, PoolingParams
from quire.config.families import families
from quire.config.hf_config import hf_config
from quire.foundation.errors import ConfigError, WeightsError
from quire.layers.rotary import rotary_table
from tests.effort import sampled
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


FLIPS: dict[str, list[Any]] = {
    "type_vocab_size": [1, 3], "position_buckets": [4, 1], "max_relative_positions": [7], "pos_att_type": [["p2c"], []],
    "norm_rel_ebd": ["none", "layer_norm"], "local_attention": [4], "global_attn_every_n_layers": [2],
    "inner_group_num": [1], "num_hidden_groups": [3], "embedding_size": [16], "relative_attention_num_buckets": [16],
    "num_attention_heads": [2], "num_hidden_layers": [2], "intermediate_size": [40], "conv_kernel_size": [3],
}  # fmt: skip


def flips(key: str, value: Any) -> list[Any]:
    """Other values that a key may have."""
    if key in FLIPS:
        return FLIPS[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value * 1.5 + 0.01]
    return ["relu"] if isinstance(value, str) and value != "relu" else []


@pytest.mark.parametrize(
    "family",
    sampled(
        [case for case in CASES if "-" not in case and case not in encoders.TURNED],
        lambda family: family in ("albert", "deberta_v2"),
    ),
)
def test_each_key_is_followed_or_refused(family: str, tmp_path: Path) -> None:
    """What transformers makes of a config with another value, or an error that names the key."""
    declared = families()[family]
    theirs = {name: alias for alias, name in declared.aliases.items()}
    told = []
    for key in [*declared.defaults, *declared.fixed]:
        for number, value in enumerate(flips(key, declared.defaults.get(key))):
            folder = tmp_path / f"{key}{number}"
            try:
                model = encoders.make(family, folder, **{theirs.get(key, key): value})
                expected = [states(model, prompt) for prompt in PROMPTS]
            except Exception:
                continue  # what does not go together there
            try:
                found = of_tokens(folder)
            except ConfigError:
                told.append("refused")
                continue
            told.append("followed")
            assert max(difference(*both) for both in zip(found, expected, strict=True)) < 1e-4, (key, value)
    assert told.count("followed") >= (2 if family == "nomic_bert" else 3)  # which fixes most of its keys
