"""Two ranks against one: the same answers to everything that can be asked, and an end that is noticed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
import torch
from safetensors import safe_open

from quire import LLM, SamplingParams
from quire.config.resolve import DEMO_MODEL
from quire.foundation.errors import ConfigError, EngineDeadError, InputError
from quire.types.structured import StructuredOutputsParams
from tests.e2e.processors import HERE
from tests.e2e.test_structured import SCHEMA, fits_schema

# Chunks of prompts, rows that start and end at different times, more requests than seats.
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_seqs": 6, "max_num_batched_tokens": 48,
    "max_model_len": 512, "num_gpu_blocks_override": 200, "logits_processors": [f"{HERE}:Force"],
    "enable_prompt_embeds": True, "async_scheduling": True,
}  # fmt: skip
PROMPTS = [
    "Hello, my name is", "The capital", "Once upon a time there was a king who had three sons, and the youngest",
    "One two three four five six seven eight nine ten. " * 6, "A", "The sky", "What is the capital of", "I think that",
]  # fmt: skip


def ranks_of(llm: LLM) -> list[psutil.Process]:
    """The workers, which are children of the process that holds the engine."""
    children = psutil.Process().children(recursive=True)
    mine = [one for one in children if "quire.executor.worker_process" in one.cmdline()]
    assert llm.info.resolved.executor == "mp"
    return mine


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    traces = str(tmp_path_factory.mktemp("traces"))
    profiling = {"profiler": "torch", "torch_profiler_dir": traces}
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with LLM(**OPTIONS, tensor_parallel_size=2, profiler_config=profiling) as llm:
        workers = [one for one in ranks_of(llm) if one.pid not in before]
        assert len(workers) == 2
        yield llm
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in workers)


def same(one: LLM, two: LLM, prompts: list[Any], params: SamplingParams | list[SamplingParams]) -> list[str]:
    """Texts and log-probabilities of both, which must agree; the texts."""
    ours, theirs = (llm.generate(prompts, params, use_tqdm=False) for llm in (two, one))
    assert two.call("check") is None
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (x.token_ids, x.finish_reason, x.stop_reason) == (y.token_ids, y.finish_reason, y.stop_reason)
            close(x.logprobs, y.logprobs)
        close(a.prompt_logprobs, b.prompt_logprobs)
    return [output.text for answer in ours for output in answer.outputs]


def close(ours: Any, theirs: Any) -> None:
    """The same tokens, within 1e-4."""
    assert (ours is None) == (theirs is None)
    for x, y in zip(ours or (), theirs or (), strict=True):
        assert (x is None) == (y is None)
        for token in (x or {}).keys() & (y or {}).keys():
            assert abs(x[token].logprob - y[token].logprob) <= 1e-4
        assert x is None or len(x.keys() ^ y.keys()) <= 2  # the last of the best may be tied


def test_greedy_and_what_it_was_sure_of(one: LLM, two: LLM) -> None:
    texts = same(one, two, PROMPTS, SamplingParams(temperature=0, max_tokens=24, logprobs=4))
    assert len(set(texts)) == len(texts)


def test_prompts_are_scored(one: LLM, two: LLM) -> None:
    same(one, two, PROMPTS[:4], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3))


def test_everything_that_edits_and_filters(one: LLM, two: LLM) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9}, {"temperature": 1.2, "top_k": 20}, {"top_p": 0.8, "n": 3}, {"min_p": 0.05},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.4}, {"logit_bias": {300: 4.0}},
        {"bad_words": ["the"], "min_tokens": 12}, {"allowed_token_ids": list(range(300, 340)), "logprobs": 2},
    ]  # fmt: skip
    params = [SamplingParams(**{"max_tokens": 16, "seed": place, **kind}) for place, kind in enumerate(kinds)]
    same(one, two, PROMPTS, params)


def test_grammars(one: LLM, two: LLM) -> None:
    wanted = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    params = [
        SamplingParams(max_tokens=90, seed=5, structured_outputs=wanted),
        SamplingParams(max_tokens=20, seed=6),
        SamplingParams(max_tokens=8, seed=7, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    ]
    texts = same(one, two, PROMPTS[:3], params)
    assert fits_schema(texts[0])
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert texts[2] in ("yes", "no")


def test_a_logits_processor_of_the_users_own_and_one_that_fails(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, extra_args={"force": [400, 401, 402]})
    ours = two.generate(PROMPTS[:2], params, use_tqdm=False)
    assert [output.outputs[0].token_ids[:3] for output in ours] == [[400, 401, 402]] * 2
    same(one, two, PROMPTS[:2], params)
    bad = SamplingParams(temperature=0, max_tokens=6, extra_args={"fail_at": 2})
    (failed,) = two.generate(PROMPTS[0], bad, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert len(failed.outputs[0].token_ids) == 2
    same(one, two, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=4))


def test_prompts_as_embeddings(one: LLM, two: LLM) -> None:
    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as file:
        table = file.get_tensor("model.embed_tokens.weight").float()
    ids = two.get_tokenizer().encode(PROMPTS[3])
    texts = same(one, two, [{"prompt_embeds": table[torch.tensor(ids)]}], SamplingParams(temperature=0, max_tokens=8))
    assert texts == [
        two.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
        .outputs[0]
        .text
    ]


def test_prefixes_are_cached_and_forgotten(two: LLM) -> None:
    long, short = PROMPTS[3] + " and", SamplingParams(temperature=0, max_tokens=4)
    (first,) = two.generate(long, short, use_tqdm=False)
    (again,) = two.generate(long, short, use_tqdm=False)
    assert again.num_cached_tokens
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert two.reset_prefix_cache()
    (anew,) = two.generate(long, short, use_tqdm=False)
    assert not anew.num_cached_tokens
    assert anew.outputs[0].token_ids == first.outputs[0].token_ids


def test_utilities_reach_every_rank(two: LLM) -> None:
    two.start_profile()
    two.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)
    two.stop_profile()
    folder = Path(two.info.resolved.config.observe.profiler_config["torch_profiler_dir"])
    assert sorted(file.name.split("-")[1] for file in folder.iterdir()) == ["rank0", "rank1"]
    assert [answer["free"] > 0 for answer in two.collective_rpc("memory")] == [True, True]
    with pytest.raises(InputError, match="distributed_executor_backend=uni"):
        two.collective_rpc(lambda worker: worker)


def test_the_report_says_what_each_rank_has(two: LLM) -> None:
    note = next(note for note in two.info.report.notes if note.startswith("tensor_parallel_size=2: "))
    assert "rank 0 on cpu" in note
    assert "; rank 1 on cpu" in note
    assert note.count("1 KV heads") == 2


@pytest.mark.long  # as `tests/pooling/test_ranks.py` has encoders
def test_vectors() -> None:
    """Of a decoder that pools."""
    options = {key: OPTIONS[key] for key in ("device", "dtype", "num_threads", "max_model_len")}
    found = []
    for ranks in (1, 2):
        with LLM(runner="pooling", convert="embed", tensor_parallel_size=ranks, **options) as llm:
            found.append(np.array([output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]))
    assert np.abs(found[0] - found[1]).max() < 1e-4


def test_preempted_all_the_time_and_killed_at_last(one: LLM) -> None:
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    with LLM(**OPTIONS, tensor_parallel_size=2, preempt_every_step=True, max_engine_restarts=0) as llm:
        same(one, llm, PROMPTS[:4], SamplingParams(temperature=0, max_tokens=10))
        first, second = (worker for worker in ranks_of(llm) if worker.pid not in others)
        os.kill(second.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker process of rank 1 .* was killed by SIGKILL"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
        assert first.pid != second.pid
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in (first, second))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size must be >= 1, got 0"),
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size=3 does not divide this model's num_attention_heads=4 and "
         r"num_key_value_heads=2; it may be 1, 2, 4"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, r"uni has one worker.*use mp"),
        ({"distributed_executor_backend": "nomad"}, r"unknown executor .nomad. \(known: uni, mp"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_the_door(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(device="cpu", **options)


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.config.devices.has_gpu", lambda: True)
    monkeypatch.setattr("quire.config.parallel.ranks.num_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 needs as many GPUs, and this process may use 1"):
        LLM(device="cuda", tensor_parallel_size=2)
