"""Copies of a model that share long prompts, against one worker: the same answers, and an end that is noticed."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open

from quire import LLM, LoRARequest, SamplingParams
from quire.config.resolve import DEMO_MODEL
from quire.foundation.errors import ConfigError, EngineDeadError
from tests.e2e.conftest import VOCAB
from tests.e2e.test_ranks import OPTIONS as USUAL
from tests.e2e.test_ranks import PROMPTS, close, ranks_of, same
from tests.e2e.test_stages import mixed_params, saved
from tests.lora.adapters import simple
from tests.models import checkpoints

COPIES, RANKS = "prefill_context_parallel_size", "tensor_parallel_size"
# Room for steps of several prompts, of one long one's chunk, and of decode rows beside either.
OPTIONS: dict[str, Any] = {**USUAL, "max_num_batched_tokens": 160}
LONG_PROMPT = "One two three four five six seven eight nine ten. " * 20
TEXTS = [*PROMPTS, LONG_PROMPT, "and the youngest of them said: " * 9]
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    traces = str(tmp_path_factory.mktemp("traces"))
    profiling = {"profiler": "torch", "torch_profiler_dir": traces}
    with LLM(**OPTIONS, **{COPIES: 2}, profiler_config=profiling) as llm:
        yield llm


def test_greedy_and_what_it_was_sure_of(one: LLM, two: LLM) -> None:
    texts = same(one, two, TEXTS, SamplingParams(temperature=0, max_tokens=24, logprobs=4))
    assert len(set(texts)) >= len(texts) - 1


def test_prompts_are_scored(one: LLM, two: LLM) -> None:
    same(one, two, TEXTS, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3))


def test_everything_that_edits_filters_and_binds(one: LLM, two: LLM) -> None:
    params = [*mixed_params(), SamplingParams(max_tokens=12, seed=3), SamplingParams(max_tokens=9, seed=4, n=2)]
    same(one, two, TEXTS, params)


def test_prompts_as_embeddings(one: LLM, two: LLM) -> None:
    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as file:
        table = file.get_tensor("model.embed_tokens.weight").float()
    ids = two.get_tokenizer().encode(LONG_PROMPT)
    given: list[Any] = [{"prompt_embeds": table[torch.tensor(ids)]}, LONG_PROMPT[7:], *PROMPTS[:3]]
    same(one, two, given, SamplingParams(temperature=0, max_tokens=8))


def test_cached_prefixes_go_on_with_a_shared_rest(one: LLM, two: LLM) -> None:
    follow_ups = [LONG_PROMPT + text * 12 for text in (" And then", " But who")]
    same(one, two, follow_ups, SamplingParams(temperature=0, max_tokens=4))
    again = two.generate(follow_ups, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert all(answer.num_cached_tokens for answer in again)
    assert two.reset_prefix_cache()
    assert one.reset_prefix_cache()
    same(one, two, follow_ups, SamplingParams(temperature=0, max_tokens=4))


def test_copies_meet_for_long_prompts_alone(two: LLM) -> None:
    """Of what a trace of each rank holds: as many meetings as layers, and one for the residual."""
    assert two.reset_prefix_cache()
    assert meetings(two, "A short one") == [0, 0]
    tokens = two.get_tokenizer().encode(LONG_PROMPT)[:150]
    assert meetings(two, {"prompt_token_ids": tokens}) == [8 + 1, 8 + 1]


def meetings(llm: LLM, prompt: Any) -> list[int]:
    folder = Path(llm.info.resolved.config.observe.profiler_config["torch_profiler_dir"])
    before = set(folder.iterdir())
    llm.start_profile()
    llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    llm.stop_profile()
    every = sorted(set(folder.iterdir()) - before)
    assert [file.name.split("-")[1].split(".")[0] for file in every] == ["rank0", "rank1"]
    traces = [json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] for file in every]
    return [sum(event["name"] == "gloo:all_gather" for event in events) for events in traces]


@pytest.mark.parametrize(
    "options",
    [
        {COPIES: 2, RANKS: 2},
        {COPIES: 4},
        {COPIES: 3, "preempt_every_step": True},
        {COPIES: 2, "kv_cache_dtype": "fp8"},
    ],
    ids=str,
)
@LONG
def test_copies_say_what_one_worker_says_and_end_together(options: dict[str, Any]) -> None:
    narrow = {key: value for key, value in options.items() if key == "kv_cache_dtype"}
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    with LLM(**OPTIONS, **narrow) as one, LLM(**OPTIONS, **options, max_engine_restarts=0) as other:
        same(one, other, TEXTS, SamplingParams(temperature=0, max_tokens=12, logprobs=2))
        workers = [worker for worker in ranks_of(other) if worker.pid not in others]
        last = options[COPIES] * options.get(RANKS, 1) - 1
        os.kill(workers[last].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"worker process of rank {last} .* was killed by SIGKILL"):
            other.generate(TEXTS, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


BARE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 256, "skip_tokenizer_init": True,
    "max_num_seqs": 6, "max_num_batched_tokens": 96,
}  # fmt: skip


def answers(folder: Path, **options: Any) -> list[Any]:
    rng = random.Random(0)
    prompts: list[Any] = [
        {"prompt_token_ids": [rng.randrange(1, VOCAB) for _ in range(n)]} for n in (100, 5, 170, 1, 33, 90, 66)
    ]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    with LLM(str(folder), **BARE, **options) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param("qwen3-windows", {COPIES: 4}, marks=LONG),
        ("deepseek3-halves-biases", {COPIES: 2}),  # latent rows, experts
        pytest.param("mistral-window", {COPIES: 2}, marks=LONG),  # no layer keeps every token
        pytest.param("gemma3n", {COPIES: 2}, marks=LONG),  # layers that attend to what others keep
        pytest.param("llama4", {COPIES: 3}, marks=LONG),  # chunks
        pytest.param("gpt_oss", {COPIES: 2, RANKS: 2, "enable_expert_parallel": True}, marks=LONG),  # sinks
        pytest.param("qwen3-windows", {COPIES: 2, "attention_backend": "sdpa"}, marks=LONG),
        pytest.param("gpt2", {COPIES: 2}, marks=LONG),  # learned positions
    ],
)
def test_tiny_models(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(case, tmp_path)
    for ours, theirs in zip(answers(folder, **options), answers(folder), strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        close(ours.outputs[0].logprobs, theirs.outputs[0].logprobs)
        close(ours.prompt_logprobs, theirs.prompt_logprobs)


@LONG
def test_adapters(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Llama", max_position_embeddings=256), tmp_path / "base")
    request = LoRARequest("one", 1, str(simple(tmp_path / "one", seed=1)))
    rng = random.Random(1)
    prompts: list[Any] = [{"prompt_token_ids": [rng.randrange(3, 97) for _ in range(n)]} for n in (150, 60, 4)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    found = []
    for options in ({}, {COPIES: 2}):
        with LLM(str(folder), **BARE, enable_lora=True, **options) as llm:
            found.append(llm.generate(prompts, params, lora_request=[request, None, request], use_tqdm=False))
    for ours, theirs in zip(*found, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        close(ours.prompt_logprobs, theirs.prompt_logprobs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({COPIES: 0}, f"{COPIES} must be >= 1, got 0"),
        ({COPIES: 2, "pipeline_parallel_size": 2}, f"{COPIES}=2 does not go with stages"),
        ({COPIES: 2, "runner": "pooling", "convert": "embed"}, f"{COPIES}=2 is for models that generate"),
        ({COPIES: 2, "distributed_executor_backend": "uni"}, "uni has one worker, and 2 ranks need a process each"),
        ({COPIES: 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "copies .* do not draft"),
    ],
)
def test_what_cannot_be_is_refused_at_the_door(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(device="cpu", **options)


@LONG
def test_a_model_with_states_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{COPIES}=2: BambaForCausalLM keeps a state") as refused:
        LLM(str(saved("bamba", tmp_path)), **BARE, **{COPIES: 2})
    assert refused.value.field == COPIES
