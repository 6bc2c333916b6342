"""Stages and spread experts against one worker: the same answers, and an end that is noticed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import workloads
from quire import LLM, SamplingParams
from quire.config.model_info import read_model_info
from quire.foundation.errors import ConfigError, EngineDeadError
from quire.models import catalog
from quire.models.base import DecoderStack
from quire.types.stages import split
from quire.types.structured import StructuredOutputsParams
from tests.e2e.conftest import VOCAB
from tests.e2e.test_ranks import OPTIONS as USUAL
from tests.e2e.test_ranks import PROMPTS, ranks_of, same
from tests.models import checkpoints, sparse_checkpoints
from tests.models.cases import CASES

OPTIONS = {key: value for key, value in USUAL.items() if key != "async_scheduling"}
BARE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 256, "skip_tokenizer_init": True,
    "max_num_seqs": 6, "max_num_batched_tokens": 32,
}  # fmt: skip
STAGES, RANKS = "pipeline_parallel_size", "tensor_parallel_size"
SPREAD = {RANKS: 2, "enable_expert_parallel": True}
MOVING = {**SPREAD, "enable_eplb": True, "eplb_config": {"step_interval": 4, "num_redundant_experts": 3}}


def mixed_params() -> list[SamplingParams]:
    """What an answer may be made with, one for each prompt: most need the tokens before, in one way or another."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "logprobs": 2}, {"temperature": 0, "repetition_penalty": 1.3},
        {"top_p": 0.8, "presence_penalty": 0.5}, {"temperature": 0, "min_tokens": 12, "bad_words": ["the"]},
        {"temperature": 0, "prompt_logprobs": 2}, {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])},
        {"temperature": 0, "max_tokens": 40},
    ]  # fmt: skip
    return [SamplingParams(**{"max_tokens": 16, "seed": place, **kind}) for place, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    "options",
    [
        {STAGES: 2, "pipeline_parallel_layers": [2, 6]},
        pytest.param({STAGES: 2, RANKS: 2}, marks=pytest.mark.long),
        pytest.param({STAGES: 3}, marks=pytest.mark.long),
        pytest.param({STAGES: 2, "preempt_every_step": True}, marks=pytest.mark.long),
    ],
)
def test_stages_say_what_one_worker_says(options: dict[str, Any]) -> None:
    """Chunks of prompts, more requests than seats, what edits logits and looks at what was said; and a rank that is
    killed at last."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with LLM(**OPTIONS) as one, LLM(**OPTIONS, **options, max_engine_restarts=0) as other:
        texts = same(one, other, PROMPTS, mixed_params())
        assert len(set(texts)) == len(texts)
        same(one, other, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=8))
        workers = [worker for worker in ranks_of(other) if worker.pid not in before]
        assert len(workers) == options[STAGES] * options.get(RANKS, 1)
        os.kill(workers[-1].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"rank {len(workers) - 1} .* was killed by SIGKILL"):
            other.generate(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def prompts() -> list[dict[str, list[int]]]:
    rng = random.Random(0)
    return [{"prompt_token_ids": [rng.randrange(1, VOCAB) for _ in range(n)]} for n in (40, 5, 70, 1, 33, 12, 9)]


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    """Greedy and seeded answers."""
    params = [
        SamplingParams(temperature=0.8 * (place % 2), seed=place, max_tokens=20, ignore_eos=True) for place in range(7)
    ]
    with LLM(str(folder), **BARE, **options) as llm:
        return [answer.outputs[0].token_ids for answer in llm.generate(prompts(), params, use_tqdm=False)]


def saved(case: str, folder: Path) -> Path:
    shape = {"vocab_size": VOCAB, "max_position_embeddings": 512}
    if case in sparse_checkpoints.CASES:
        return checkpoints.save(sparse_checkpoints.make(case, **shape), folder)
    made, config = CASES[case]
    return checkpoints.save(checkpoints.make(made, **{**config, **shape}), folder)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("case", "every"),
    [
        ("qwen3", [MOVING]),
        pytest.param("qwen3", [SPREAD, {STAGES: 2}], marks=LONG),
        pytest.param("qwen3-all-experts", [{STAGES: 2, **SPREAD}], marks=LONG),
        pytest.param("gpt_oss", [SPREAD, {STAGES: 2}], marks=LONG),  # biases
        pytest.param("deepseek3-halves-biases", [SPREAD, {STAGES: 2}], marks=LONG),  # shared experts, latent rows
        pytest.param("bamba", [{STAGES: 2}, {STAGES: 3}], marks=LONG),  # a stage without attention
        pytest.param("gemma2", [{STAGES: 3}], marks=LONG),
        pytest.param("mamba2-biases", [{STAGES: 2, RANKS: 2}], marks=LONG),
        pytest.param("gpt2", [{STAGES: 2}], marks=LONG),  # positions, a tied head
    ],
)
def test_tiny_models_in_stages_and_with_spread_experts(case: str, every: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = saved(case, tmp_path)
    whole = tokens(folder)
    for options in every:
        assert tokens(folder, **options) == whole, options


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param("qwen3", MOVING, marks=LONG),
        pytest.param("deepseek3-halves-biases", {RANKS: 2}, marks=LONG),  # latent rows
        pytest.param("gpt_oss", SPREAD, marks=LONG),  # sinks, windows
    ],
)
def test_ranks_draft(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Answers of few tokens, so that drafts are right now and then: as many of them as with one worker."""
    folder, drafts = saved(case, tmp_path), {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    params = [
        SamplingParams(temperature=0.8 * (seed % 2), seed=seed, max_tokens=24, allowed_token_ids=[3, 5, 8, 13])
        for seed in range(7)
    ]
    found = []
    for more in ({}, {"speculative_config": {**drafts, "policy": "always"}}):
        for ranks in ({"distributed_executor_backend": "mp"}, options):
            with LLM(str(folder), **BARE, **more, **ranks) as llm:
                outputs = llm.generate(prompts(), params, use_tqdm=False)
                stats = llm.call("stats")
            found.append(([output.outputs[0].token_ids for output in outputs], stats.get("num_accepted_tokens", 0)))
    assert [answers for answers, _ in found[1:]] == [found[0][0]] * 3
    accepted = [count for _, count in found]
    assert accepted[:2] == [0, 0]
    assert accepted[2] == accepted[3] > 20


@pytest.mark.long
def test_experts_that_move_say_the_same(tmp_path: Path) -> None:
    """Whenever they are told to, three of them twice; every few steps: `MOVING` above."""
    folder = saved("qwen3", tmp_path)
    with LLM(str(folder), **BARE, **{**MOVING, "eplb_config": {"step_interval": 10**6}}) as llm:
        assert llm.collective_rpc("rebalance_experts") == [0, 0]
        llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert llm.collective_rpc("rebalance_experts") in ([1, 1], [2, 2], [3, 3])  # layers, the same on both
        assert llm.collective_rpc("rebalance_experts") == [0, 0]


@pytest.mark.long
def test_random_weights_are_those_of_one_worker(tmp_path: Path) -> None:
    folder = saved("qwen3", tmp_path)
    assert tokens(folder, load_format="dummy", **{STAGES: 2}) == tokens(folder, load_format="dummy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({STAGES: 0}, "pipeline_parallel_size must be >= 1, got 0"),
        ({STAGES: 9}, "pipeline_parallel_size=9 is more than the model's 8 layers"),
        ({STAGES: 2, "pipeline_parallel_layers": [4, 5]}, "that make the model's 8: got 4,5"),
        ({STAGES: 3, "pipeline_parallel_layers": [4, 4]}, "must be 3 numbers of layers"),
        ({"pipeline_parallel_layers": [4, 4]}, "set pipeline_parallel_size=2, or leave it out"),
        ({STAGES: 2, "runner": "pooling", "convert": "embed"}, "stages are for models that generate"),
        ({STAGES: 2, "distributed_executor_backend": "uni"}, "uni has one worker, and 2 ranks need a process each"),
        ({STAGES: 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "stages do not draft"),
        ({RANKS: 2, "enable_expert_parallel": True}, "enable_expert_parallel: .* has no experts"),
        ({RANKS: 2, "enable_eplb": True}, "enable_eplb moves experts between ranks: set enable_expert_parallel"),
        ({"eplb_config": {"step_interval": 5}}, "eplb_config says how experts move: set enable_eplb"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_the_door(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(device="cpu", **options)


@pytest.mark.parametrize(
    ("layers", "stages", "head", "counts"),
    [
        (32, 2, 0.0, [16, 16]),
        (7, 4, 0.0, [2, 2, 2, 1]),
        (32, 2, 2.4, [17, 15]),  # llama-3.1-8b
        (48, 2, 0.5, [24, 24]),
        (6, 2, 30.0, [5, 1]),
        (8, 3, 20.0, [3, 4, 1]),
    ],
)
def test_layers_are_dealt_by_work(layers: int, stages: int, head: float, counts: list[int]) -> None:
    assert [stage.end - stage.begin for stage in split(layers, stages, (), head)] == counts


@pytest.mark.parametrize(("model", "counts"), [("llama-3.1-8b", [17, 15]), ("qwen3-30b-a3b", [24, 24])])
def test_logits_are_work_of_the_last_stage(model: str, counts: list[int], tmp_path: Path) -> None:
    info = read_model_info(workloads.write_model_dir(model, tmp_path / "m"), {})
    meta = torch.device("meta")
    stages = [catalog.build(info, torch.bfloat16, meta, 64, place=catalog.Place(number, 2)) for number in range(2)]
    assert [len(stage.layers) for stage in stages if isinstance(stage, DecoderStack)] == counts


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"window_size": 10}, "eplb_config has no window_size: it has step_interval"),
        ({"step_interval": 0}, "step_interval must be an integer >= 1, got 0"),
        ({"num_redundant_experts": 9}, "num_redundant_experts must be <= 8, a copy on every rank, got 9"),
    ],
)
def test_how_experts_move_is_checked(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(saved("qwen3", tmp_path)), **BARE, **SPREAD, enable_eplb=True, eplb_config=config)


def test_more_ranks_than_experts(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)  # of four
    with pytest.raises(ConfigError, match="=8 is more than the model's num_local_experts=4"):
        LLM(str(folder), **BARE, **{RANKS: 8, "enable_expert_parallel": True})
