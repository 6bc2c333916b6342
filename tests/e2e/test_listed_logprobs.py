"""Log-probabilities of given ids beside those of the likeliest tokens, in one batch, against torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.foundation.errors import InputError
from tests.e2e.conftest import VOCAB
from tests.e2e.test_greedy_equals_transformers import prompts

WANTED: list[dict[str, Any]] = [
    {"logprob_token_ids": [5, 3, 5, 198]},
    {"logprobs": 4},
    {},
    {"logprob_token_ids": list(range(128)), "logprobs": 7},
    {"logprob_token_ids": [0], "temperature": 1.5, "seed": 4, "logit_bias": {9: 20.0}},
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_batch_of_all_kinds(tiny_qwen3: Path, device: str) -> None:
    from transformers import AutoModelForCausalLM

    given = prompts(len(WANTED), seed=41)
    base = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "detokenize": False}
    options: dict[str, Any] = {"device": device, "dtype": "float32", "num_threads": 1, "skip_tokenizer_init": True}
    with LLM(str(tiny_qwen3), max_model_len=128, **options) as llm:
        outputs = llm.generate(given, [SamplingParams(**{**base, **wanted}) for wanted in WANTED], use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    for prompt, wanted, output in zip(given, WANTED, outputs, strict=True):
        answer = output.outputs[0]
        if not wanted:
            assert answer.logprobs is None
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        assert len(answer.logprobs) == 6
        for line, token, entries in zip(expected, answer.token_ids, answer.logprobs, strict=True):
            listed = wanted.get("logprob_token_ids")
            ids = line.topk(4).indices.tolist() if listed is None else listed
            assert set(entries) == {token, *ids}
            for i, entry in entries.items():
                assert entry.logprob == pytest.approx(float(line[i]), abs=1e-3)
            assert entries[token].rank == int((line > line[token]).sum()) + 1
            ranks = {entry.rank for i, entry in entries.items() if i != token}
            assert listed is None or ranks <= {None}


@pytest.mark.parametrize(
    "ids", [[], list(range(129)), [-1], [True], [1.5], [VOCAB]], ids=["none", "129", "-1", "bool", "float", "too large"]
)
def test_wrong_ids(tiny_qwen3: Path, ids: list[Any]) -> None:
    with (
        LLM(str(tiny_qwen3), device="cpu", num_threads=1, max_model_len=64, skip_tokenizer_init=True) as llm,
        pytest.raises(InputError, match="logprob_token_ids") as caught,
    ):
        llm.generate([[1]], SamplingParams(logprob_token_ids=ids, detokenize=False), use_tqdm=False)
    assert caught.value.param == "logprob_token_ids"
