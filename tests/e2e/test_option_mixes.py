"""Options drawn at random, all at once: whatever they are, an engine starts and greedy text is that of transformers.

Smallest and odd values are among them: those are what one option alone is tried with least.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.e2e.conftest import Reference
from tests.e2e.test_greedy_equals_transformers import prompts
from tests.effort import some
from tests.models import checkpoints
from tests.models.cases import CASES

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
TOKENS, LONGEST = 20, 40
VALUES: dict[str, list[Any]] = {
    "max_num_seqs": [1, 2, 3, 5, 64],
    "max_num_batched_tokens": [64, 65, 100, 512],
    "max_prefill_chunk": [0, 0, 1, 7, 16, 64],
    "block_size": [16, 16, 32, 64],
    "max_model_len": [60, 61, 128, 512],
    "num_gpu_blocks_override": [None, 1, 1.5, 4],  # of what one request needs
    "enable_prefix_caching": [True, False],
    "async_scheduling": [True, False],
    "scheduling_policy": ["fcfs", "priority"],
    "stream_interval": [1, 3],
    "speculative_config": [{}, {}, {**DRAFTS, "policy": "always"}, {**DRAFTS, "policy": "auto"}],
    "enable_lora": [False, False, True],
    "preempt_every_step": [False, False, True],
    "enable_prompt_embeds": [False, True],
    "enable_mfu_metrics": [False, True],
}
ON_A_GPU: dict[str, list[Any]] = {
    "enforce_eager": [False, False, True],
    "cuda_graph_sizes": [None, [1], [2, 5], [3, 17]],
    "attention_backend": [None, None, "sdpa"],
}


def mix(number: int, values: dict[str, list[Any]]) -> dict[str, Any]:
    rng = random.Random(number)
    drawn = {name: rng.choice(several) for name, several in values.items()}
    if (share := drawn["num_gpu_blocks_override"]) is not None:
        drafts = drawn["speculative_config"].get("num_speculative_tokens", 0)
        needed = -(-(drawn["max_model_len"] + drafts) // drawn["block_size"]) + 1
        drawn["num_gpu_blocks_override"] = int(share * needed)
    return {name: value for name, value in drawn.items() if value is not None}


def check(folder: Path, reference: Reference, options: dict[str, Any], seed: int) -> None:
    wanted = prompts(7, longest=LONGEST, seed=seed)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    with LLM(str(folder), skip_tokenizer_init=True, dtype="float32", **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in wanted], params, use_tqdm=False)
        assert llm.call("check") is None  # no block, no seat is left behind
    assert [output.outputs[0].token_ids for output in outputs] == [reference.greedy(p, TOKENS) for p in wanted]


@pytest.mark.parametrize("number", range(some(200, 4)))
def test_on_a_cpu(tiny_qwen3: Path, reference: Reference, number: int) -> None:
    options = {"device": "cpu", "num_threads": 1, **mix(number, VALUES)}
    print(options)
    check(tiny_qwen3, reference, options, number)


@pytest.mark.long
@pytest.mark.parametrize("name", [
    "gemma3", "exaone4", "mistral-window", "minicpm3", "qwen2-tied", "mamba2", "jamba-experts", "qwen3_next-experts",
    "granitemoehybrid-experts", "kimi_linear", "lfm2", "falcon_h1",
])  # fmt: skip
def test_other_kinds_of_layers(name: str, tmp_path: Path) -> None:
    """Windows, latent rows, states, experts: the text is that of the same model with plain options."""
    family, config = CASES[name]
    folder = checkpoints.save(checkpoints.make(family, **config), tmp_path / name)
    keeps_state = name not in ("gemma3", "exaone4", "mistral-window", "minicpm3", "qwen2-tied")
    values = {**VALUES, "max_model_len": [60, 61, 100], "num_gpu_blocks_override": [None]}
    if keeps_state:
        values["speculative_config"] = [{}]
    for quantization in (None, "int8", "fp8"):
        always = {"device": "cpu", "num_threads": 1, **({"quantization": quantization} if quantization else {})}
        plain = greedy(folder, max_model_len=100, **always)
        for number in range(5):
            options = {**mix(number, values), **always}
            assert greedy(folder, **options) == plain, options


def greedy(folder: Path, **options: Any) -> list[list[int]]:
    rng = random.Random(5)
    wanted = [[rng.randrange(3, 97) for _ in range(rng.randint(1, 30))] for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    with LLM(str(folder), skip_tokenizer_init=True, dtype="float32", **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in wanted], params, use_tqdm=False)
        assert llm.call("check") is None
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("number", range(60))
def test_on_a_gpu(tiny_qwen3: Path, reference: Reference, number: int) -> None:
    options = {"device": "cuda", "gpu_memory_utilization": 0.05, **mix(number, VALUES | ON_A_GPU)}
    print(options)
    check(tiny_qwen3, reference, options, number)
