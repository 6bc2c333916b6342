"""The same promises on a GPU: float32 there gives the greedy text of transformers on the CPU, graphs or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from demo import agreement, chat, corpus
from quire import LLM, SamplingParams
from quire.worker.mixed_graphs import MixedGraphs, MixedSize
from tests.e2e.conftest import Reference
from tests.e2e.test_greedy_equals_transformers import TOKENS, prompts, run
from tests.e2e.test_windows import MODELS, Model, check
from tests.e2e.test_windows import prompts as window_prompts

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 64, "max_num_batched_tokens": 512}
CASES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "depth 1": {"async_scheduling": False},
    "chunks of 16, no prefix cache": {"max_prefill_chunk": 16, "enable_prefix_caching": False},
    "a pool so small that requests are preempted": {"num_gpu_blocks_override": 60},
    "few graph sizes": {"cuda_graph_sizes": [3, 17, 40]},
    "a worker process of its own": {"distributed_executor_backend": "mp"},
}

RANKS: dict[str, dict[str, Any]] = {"two ranks": {"tensor_parallel_size": 2}}

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("case", [*CASES, pytest.param("two ranks", marks=TWO)])
def test_a_batch_of_64_of_mixed_lengths(tiny_qwen3: Path, reference: Reference, case: str) -> None:
    wanted = prompts(64)
    expected = [reference.greedy(p, TOKENS) for p in wanted]
    assert run(tiny_qwen3, wanted, **OPTIONS, **{**CASES, **RANKS}[case]) == expected


def test_prompts_beside_decoding_rows_replay_graphs(
    tiny_qwen3: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[MixedSize] = []
    forward = MixedGraphs.forward

    def noted(self: MixedGraphs, size: MixedSize) -> None:
        replayed.append(size)
        forward(self, size)

    monkeypatch.setattr(MixedGraphs, "forward", noted)
    wanted = prompts(40)
    expected = [reference.greedy(p, TOKENS) for p in wanted]
    assert run(tiny_qwen3, wanted, **{**OPTIONS, "max_num_seqs": 24}, max_prefill_chunk=32) == expected
    assert any(size.decodes for size in replayed)


def test_graphs_captured_by_their_first_step_or_in_idle_time(tiny_qwen3: Path, reference: Reference) -> None:
    wanted = prompts(12)
    expected = [reference.greedy(p, TOKENS) for p in wanted]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in wanted]
    with LLM(str(tiny_qwen3), max_model_len=320, skip_tokenizer_init=True, **OPTIONS) as llm:

        def missing() -> int:
            [found] = llm.collective_rpc(lambda worker: len(worker.runner.mixed.graphs.missing))
            return int(found)

        early = missing()
        first = llm.generate(given, params, use_tqdm=False)
        assert missing() < early
        while llm.collective_rpc("prepare")[0]:
            pass
        assert not missing()
        second = llm.generate(given, params, use_tqdm=False)
    for outputs in (first, second):
        assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_preemption_at_every_step(tiny_qwen3: Path, reference: Reference) -> None:
    wanted = prompts(6, longest=40, seed=11)
    expected = [reference.greedy(p, TOKENS) for p in wanted]
    assert run(tiny_qwen3, wanted, **OPTIONS, preempt_every_step=True) == expected


WINDOWED: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager, chunks of 48": {"enforce_eager": True, "max_prefill_chunk": 48},
    "a preemption at every step": {"preempt_every_step": True},
}


@pytest.mark.parametrize("case", WINDOWED)
@pytest.mark.parametrize("name", MODELS)
def test_layers_with_windows(name: str, case: str, tmp_path: Path) -> None:
    """The second time most of the prompts are found in the prefix cache."""
    model = Model(tmp_path, *MODELS[name])
    with LLM(str(model.folder), max_model_len=512, skip_tokenizer_init=True, **OPTIONS, **WINDOWED[case]) as llm:
        check(model, llm, window_prompts())
        cached = check(model, llm, window_prompts())
    assert min(cached[2:5]) >= 80


@pytest.mark.parametrize("name", ["qwen3: five to one", "mistral: all"])
def test_an_8_bit_cache_of_layers_with_windows(name: str, tmp_path: Path) -> None:
    """Whatever the cut, the same text; and one that begins as with a wide cache."""
    model = Model(tmp_path, *MODELS[name])
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    wanted = [{"prompt_token_ids": prompt} for prompt in window_prompts()]
    texts = []
    for options in ({}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8", "enforce_eager": True}):
        used = {**OPTIONS, "dtype": "bfloat16", **options}
        with LLM(str(model.folder), max_model_len=512, skip_tokenizer_init=True, **used) as llm:
            outputs = llm.generate(wanted, params, use_tqdm=False)
            assert llm.call("check") is None
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[1] == texts[2]
    assert sum(wide[0] == narrow[0] for wide, narrow in zip(texts[0], texts[1], strict=True)) >= len(wanted) / 2


KINDS: dict[str, list[dict[str, Any]]] = {
    "filters, whose decode steps are graphs": [{"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {}],
    "everything": [
        {},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logit_bias": {5: 3.0}, "min_tokens": 8, "logprobs": 3},
    ],
}


@pytest.mark.parametrize("kinds", KINDS)
def test_a_seed_gives_the_cpus_tokens(tiny_qwen3: Path, kinds: str) -> None:
    """Same definition of the draw on both devices, whatever the parameters."""
    wanted = prompts(12, seed=51)
    params = [
        SamplingParams(
            temperature=0.8,
            seed=i,
            max_tokens=32,
            ignore_eos=True,
            detokenize=False,
            **KINDS[kinds][i % len(KINDS[kinds])],
        )
        for i in range(12)
    ]
    texts = []
    for options in (OPTIONS, {"device": "cpu", "num_threads": 1}):
        with LLM(str(tiny_qwen3), max_model_len=320, skip_tokenizer_init=True, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in wanted], params, use_tqdm=False)
        texts.append([o.outputs[0].token_ids for o in outputs])
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= 11, f"{same} of 12 answers are equal"  # a draw may fall on a rounding border once


def test_a_cache_in_8_bits_changes_few_answers() -> None:
    """The demo model is sure of what it says: of its answers nearly all stay."""
    tokenizer = Tokenizer.from_file(str(agreement.MODEL / "tokenizer.json"))
    tasks = [task for skill in corpus.SKILLS for task in corpus.heldout(skill, 20, 0)]
    wanted = [tokenizer.encode(chat.prompt_text(t.messages, t.tools, t.thinking)).ids for t in tasks]
    options = {"device": "cuda", "dtype": "bfloat16"}
    plain = agreement.answers(wanted, options)
    narrow = agreement.answers(wanted, {**options, "kv_cache_dtype": "fp8"})
    assert sum(a == b for a, b in zip(plain, narrow, strict=True)) >= 0.9 * len(wanted)
