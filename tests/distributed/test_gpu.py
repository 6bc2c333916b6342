"""Ranks on GPUs: kernels that meet, graphs that hold them, and the text of one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire import LLM, SamplingParams
from tests.e2e.conftest import VOCAB
from tests.e2e.test_experts import TOKENS, largest_error, prompts
from tests.models import checkpoints, sparse_checkpoints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROOT = Path(__file__).parents[2]
PROMPTS = ["Hello, my name is", "The capital of France", "Once upon a time", "One two three four five six " * 40]
MARGIN = 0.1  # between the best two, in bfloat16: nearer ones may change places


@pytest.mark.parametrize("size", [2, 4])
def test_sums_logits_and_tokens_eagerly_and_in_graphs(size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    command = [sys.executable, "-m", "tests.distributed.gpu_ranks"]
    arguments = [str(size), str(tmp_path / "meeting"), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ranks = [
        subprocess.Popen([*command, str(rank), *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE)
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=300)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)
    first, *others = [torch.load(tmp_path / f"out{rank}", weights_only=True) for rank in range(size)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), "ranks have other bits"


def answers(**options: Any) -> list[list[tuple[int, dict[int, Any]]]]:
    """Tokens of greedy answers with the best two, every request several times so that prefixes are shared."""
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=2, ignore_eos=True)
    with LLM(max_model_len=1024, max_num_seqs=64, gpu_memory_utilization=0.3, **options) as llm:
        found = llm.generate(PROMPTS * 4, params, use_tqdm=False)
        assert llm.call("check") is None
        return [list(zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)) for o in found]


DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "policy": "always"}
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shared layers": TWO, "eagerly": TWO | {"enforce_eager": True}, "drafts": TWO | {"speculative_config": DRAFTS},
    "8 bits": TWO | {"quantization": "fp8"}, "4 bits": TWO | {"quantization": "int4"},
    "stages": {"pipeline_parallel_size": 2}, "copies": {"data_parallel_size": 2},
    "shared prompts": {"prefill_context_parallel_size": 2},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_say_what_one_says(layout: str) -> None:
    options, margin = LAYOUTS[layout], MARGIN * (4 if layout == "8 bits" else 1)  # of activations, too
    alone = {name: value for name, value in options.items() if not name.endswith("_size")}
    compared = 0
    for ours, theirs in zip(answers(**options), answers(**alone), strict=True):
        for (token, a), (other, b) in zip(ours, theirs, strict=True):
            best, second = sorted((entry.logprob for entry in b.values()), reverse=True)[:2]
            if token != other:
                assert best - second < margin, "another token where one was much likelier"
                break
            assert abs(a[token].logprob - b[token].logprob) < 2 * margin
            compared += 1
    assert compared > 200


WIDE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_prompts_whose_sums_are_under_way_say_what_one_gpu_says(tmp_path: Path) -> None:
    """Layers wide enough for steps of these prompts to be cut into pieces."""
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    ids = torch.randint(1000, (3, 2700), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.3}
    options |= {"max_model_len": 4096, "max_num_batched_tokens": 8192}
    found = []
    for ranks in ({}, TWO):
        with LLM(str(tmp_path), **options, **ranks) as llm:
            for _ in range(2):  # the second time with what the first has cached
                outputs = llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
            values = [one[token].logprob for o, own in zip(outputs, ids, strict=True)
                      for one, token in zip(o.prompt_logprobs[1:], own[1:], strict=True)]  # fmt: skip
            found.append(torch.tensor(values))
    assert found[0].std() > 0.5
    assert (found[0] - found[1]).abs().max() < 2 * MARGIN


def test_draws_from_parts_are_those_from_whole_logits() -> None:
    """Log-probabilities and filters that leave all tokens have logits gathered: the same seeds draw the same. Batches
    may come about otherwise, and logits with them."""
    every = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=(0, 1, 0.6)[row % 3], seed=row) for row in range(24)
    ]
    changes: list[dict[str, Any]] = [{}, {"logprobs": 0}, {"top_p": 0.999999}, {"presence_penalty": 1e-6}]
    found = []
    with LLM(
        max_model_len=1024, max_num_seqs=64, gpu_memory_utilization=0.3, enable_prefix_caching=False, **TWO
    ) as llm:
        for change in changes:
            params = [msgspec.structs.replace(one, **change) for one in every]
            texts = llm.generate(PROMPTS[:1] * len(params), params, use_tqdm=False)
            found.append([tuple(text.outputs[0].token_ids) for text in texts])
            assert llm.call("check") is None
    plain, *gathered = found
    for others in gathered:
        assert sum(a == b for a, b in zip(plain, others, strict=True)) >= len(plain) * 2 // 3
    assert len(set(plain)) > 8


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("case", ["qwen3", "gpt_oss", "glm-groups"])
def test_experts_of_two_gpus(case: str, expert_parallel: bool, tmp_path: Path) -> None:
    """What transformers computes, in float32: however graphs of other sizes come to be captured while others run."""
    reference = sparse_checkpoints.make(case, vocab_size=VOCAB, max_position_embeddings=512)
    folder = checkpoints.save(reference, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True}
    options |= {"gpu_memory_utilization": 0.3, "enable_expert_parallel": expert_parallel}
    with LLM(str(folder), **options, **TWO, max_num_seqs=24, max_num_batched_tokens=64) as llm:
        for count in (1, 3):
            assert largest_error(reference, llm.generate(prompts() * count, params, use_tqdm=False)) < 2e-3
