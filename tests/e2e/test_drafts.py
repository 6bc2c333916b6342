"""Answers are the same with drafts and without, whatever a request asks for and however the work is cut."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.speculative import DRAFTERS
from quire.frontend.llm_engine import LLMEngine
from quire.types.repetition import RepetitionDetectionParams
from quire.types.structured import StructuredOutputsParams
from quire.worker.drafters import DrafterSetup
from tests.e2e.conftest import VOCAB, Reference
from tests.e2e.processors import HERE
from tests.effort import WHOLE
from tests.sampling.rows import chi_square_limit

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ALWAYS = {"speculative_config": {**DRAFTS, "policy": "always"}}
RANKS = {"tensor_parallel_size": 2}
OPTIONS: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "max_model_len": 160, "skip_tokenizer_init": True, "max_num_seqs": 12,
    "logits_processors": [f"{HERE}:NoRepeatOnDevice", f"{HERE}:NoRepeatOnHost"],
}  # fmt: skip
FEW = [3, 5, 8, 13]  # tokens: text of few repeats itself, so that drafts are found and often right
LIST = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 9}
FEATURES: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0, "allowed_token_ids": None},
    {"temperature": 0, "allowed_token_ids": None, "repetition_penalty": 1.3},
    {"top_k": 2},
    {"top_p": 0.8, "min_p": 0.05},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.2, "logprobs": 2},
    {"min_tokens": 9, "stop_token_ids": [5]},
    {"stop_token_ids": [13]},
    {"bad_words_token_ids": [[3, 5], [8]]},
    {"logit_bias": {3: 2.0, 5: -1.0}},
    {"logprobs": 3},
    {"logprobs": 0, "prompt_logprobs": 2},
    {"logprob_token_ids": [3, 8], "logprobs": 1},
    {"repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=3)},
    {"n": 3},
    {"extra_args": {"no_repeat": "device"}, "allowed_token_ids": None},
    {"extra_args": {"no_repeat": "host"}, "allowed_token_ids": None},
    *({"max_tokens": count} for count in (1, 2, 3, 4, 5)),
]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Each feature with a prompt of few tokens, which is repeated in its answer, and some that reach the context's end.

    Behind them as many without any.
    """
    rng = random.Random(11)
    made = []
    for number, feature in enumerate([*FEATURES, *[{}] * 6]):
        ends_with_context = number >= len(FEATURES)
        prompt = [rng.choice(FEW) for _ in range(rng.randint(140, 157) if ends_with_context else rng.randint(4, 40))]
        params = {
            "temperature": 0.7, "seed": number, "max_tokens": 40, "ignore_eos": True, "detokenize": False,
            "allowed_token_ids": FEW, **feature,
        }  # fmt: skip
        made.append((prompt, SamplingParams(**params)))
    return made


def told(output: Any) -> list[Any]:
    """What a request's answer consists of."""

    def entries(lines: Any) -> Any:
        return lines and [line and {token: entry.logprob for token, entry in line.items()} for line in lines]

    answers = [(a.token_ids, a.finish_reason, a.stop_reason, entries(a.logprobs)) for a in output.outputs]
    return [entries(output.prompt_logprobs), *answers]


def same(one: Any, other: Any) -> bool:
    """Equal, up to the rounding of log-probabilities."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(abs(one[key] - other[key]) < 1e-3 for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def run(folder: Path, **options: Any) -> tuple[list[Any], dict[str, float]]:
    given = requests()
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        prompts, params = [{"prompt_token_ids": prompt} for prompt, _ in given], [params for _, params in given]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.call("check") is None
        counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return [told(output) for output in outputs], counted


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path) -> list[Any]:
    answers, counted = run(tiny_qwen3)
    assert "vllm:spec_decode_num_drafts" not in counted
    return answers


CASES: dict[str, dict[str, Any]] = {
    "one plan in flight": {},
    "two plans in flight": {"async_scheduling": True},
    "a pool so small that requests are preempted": {"async_scheduling": True, "num_gpu_blocks_override": 26},
    "chunks, and a small budget": {"async_scheduling": True, "max_num_batched_tokens": 48, "max_prefill_chunk": 16},
    "no prefix cache, small blocks": {"async_scheduling": True, "enable_prefix_caching": False, "block_size": 4},
    "a worker of its own": {"distributed_executor_backend": "mp"},
    "two ranks, two plans in flight": {**RANKS, "async_scheduling": True},
    "two ranks, preempted": {**RANKS, "async_scheduling": True, "num_gpu_blocks_override": 26},
    "two ranks, preempted at every step": {**RANKS, "preempt_every_step": True},
}


@pytest.mark.parametrize("case", CASES)
def test_every_feature_gives_the_answer_that_it_gives_without(tiny_qwen3: Path, expected: list[Any], case: str) -> None:
    answers, counted = run(tiny_qwen3, **ALWAYS, **CASES[case])
    for (_, params), answer, wanted in zip(requests(), answers, expected, strict=True):
        assert same(answer, wanted), params
    assert counted["vllm:spec_decode_num_accepted_tokens"] > 100
    assert counted["vllm:spec_decode_num_draft_tokens"] > counted["vllm:spec_decode_num_accepted_tokens"]


@pytest.mark.long  # as `test_answers_go_on_when_the_worker_dies` has two ranks, which accept
def test_two_ranks_accept_what_one_accepts(tiny_qwen3: Path, expected: list[Any]) -> None:
    """Chunks, and a small budget: as many drafts are made as by one, and as many of them are right."""
    found = []
    for options in (RANKS, {"distributed_executor_backend": "mp"}):
        answers, counted = run(tiny_qwen3, **ALWAYS, **options, max_num_batched_tokens=48, max_prefill_chunk=16)
        assert all(map(same, answers, expected))
        found.append({name: count for name, count in counted.items() if "spec_decode" in name})
    assert found[0] == found[1]
    assert found[0]["vllm:spec_decode_num_accepted_tokens"] > 100


def drive(folder: Path, kill_after: int, **options: Any) -> tuple[list[Any], LLMEngine]:
    """The answers to `requests`, of workers of which one is killed after so many steps."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    engine = LLMEngine.from_options(str(folder), **OPTIONS, distributed_executor_backend="mp", **options)
    started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    workers = [child for child in started if "quire.executor.worker_process" in child.cmdline()]
    assert len(workers) == options.get("tensor_parallel_size", 1)
    for number, (prompt, params) in enumerate(requests()):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    found: dict[str, Any] = {}
    for step in itertools.count(1):
        found |= {output.request_id: output for output in engine.step() if output.finished}
        if not engine.has_unfinished_requests():
            return [told(found[str(number)]) for number in range(len(found))], engine
        if step == kill_after:
            max(workers, key=lambda worker: worker.pid).kill()
    raise AssertionError


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_answers_go_on_when_the_worker_dies(tiny_qwen3: Path, expected: list[Any], ranks: int) -> None:
    """The next engine is given what there is of them, and drafts on from there."""
    answers, engine = drive(tiny_qwen3, kill_after=12, **ALWAYS, tensor_parallel_size=ranks)
    counted = {metric.name: metric for metric in engine.get_metrics()}
    engine.shutdown()
    assert counted["quire:engine_restarts"].value == 1  # type: ignore[attr-defined]
    accepted = counted["vllm:spec_decode_num_accepted_tokens"].value  # type: ignore[attr-defined]
    assert accepted > 100
    for (_, wanted), found, other in zip(requests(), answers, expected, strict=True):
        assert same(found, other), wanted


def test_greedy_text_is_that_of_transformers(tiny_qwen3: Path, reference: Reference) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30))] * 2 for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
    with LLM(str(tiny_qwen3), **OPTIONS, **ALWAYS) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [reference.greedy(p, 48) for p in prompts]


WINDOWS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 24},
    "Qwen3": {"use_sliding_window": True, "sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("family", WINDOWS)
def test_a_window_is_kept(tmp_path_factory: pytest.TempPathFactory, family: str) -> None:
    """In all layers, and in some."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.4,
        tie_word_embeddings=False, dtype="float32", **WINDOWS[family],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp(family)
    getattr(transformers, f"{family}ForCausalLM")(config).float().save_pretrained(folder)
    rng = random.Random(4)
    prompts = [{"prompt_token_ids": [rng.choice(FEW) for _ in range(40)]} for _ in range(8)]
    params = [
        SamplingParams(temperature=0.5, seed=seed, max_tokens=90, detokenize=False, allowed_token_ids=FEW)
        for seed in range(8)
    ]
    answers, small = [], {"num_gpu_blocks_override": 34}
    for options in ({}, ALWAYS, {**ALWAYS, "async_scheduling": True}, {**ALWAYS, **small, "async_scheduling": True}):
        with LLM(str(folder), **OPTIONS, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert llm.call("check") is None
            assert not options or llm.call("stats")["num_accepted_tokens"] > 100
    assert answers[1:] == [answers[0]] * 3


def test_texts_stops_and_grammars() -> None:
    """The demo model: rows under a grammar beside others and stop strings within what a step brings."""
    prompts = ["one two three one two three one", "A list: 1, 2, 3, 4, 1, 2, 3, 4, 1,", "Hello, hello, hello,"] * 2
    wanted = [
        {"stop": ["thr"]},
        {"stop": [", 3", "o w"], "include_stop_str_in_output": True},
        {"structured_outputs": StructuredOutputsParams(regex="(ab|cd){3,20}")},
        {"structured_outputs": StructuredOutputsParams(json=LIST)},
        {"stop": ["zzz"]},
        {},
    ]  # fmt: skip
    params = [SamplingParams(temperature=0.6, seed=i, max_tokens=40, **more) for i, more in enumerate(wanted)]
    found = []
    every = [{}, ALWAYS, {**ALWAYS, "async_scheduling": True}]
    for options in every + [{**every[-1], **RANKS}] * WHOLE:
        with LLM(device="cpu", dtype="float32", max_model_len=256, max_num_seqs=8, **options) as llm:
            answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            found.append([(a.text, a.token_ids, a.finish_reason, a.stop_reason) for a in answers])
    assert found[1:] == found[:1] * (len(found) - 1)


def pairs(folder: Path, seeds: range, **options: Any) -> Counter[tuple[int, ...]]:
    """The third and fourth token of answers of few tokens to one prompt, by seed."""
    params = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=4, detokenize=False, allowed_token_ids=FEW)
        for seed in seeds
    ]
    prompt = [5, 3, 8, 5, 13, 8, 3, 5, 8]
    with LLM(str(folder), **{**OPTIONS, "max_num_seqs": 64}, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}] * len(seeds), params, use_tqdm=False)
    return Counter(tuple(output.outputs[0].token_ids[2:]) for output in outputs)


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.long)])
def test_drafts_change_no_distribution(tiny_qwen3: Path, count: int) -> None:
    """Two samples by different seeds, of which one had drafts, are of one distribution (chi-square of homogeneity)."""
    without = pairs(tiny_qwen3, range(count))
    drafted = pairs(tiny_qwen3, range(count, 2 * count), **ALWAYS)
    both = np.array([[sample[pair] for pair in itertools.product(FEW, FEW)] for sample in (without, drafted)], float)
    assert both.sum() == 2 * count
    both = both[:, both.sum(0) >= 10]
    expected = both.sum(1, keepdims=True) * both.sum(0) / both.sum()
    assert both.shape[1] > 4
    assert ((both - expected) ** 2 / expected).sum() < chi_square_limit(both.shape[1] - 1)


class Oracle:
    """A drafter of somebody else's: the tokens that `Oracle.text` says, and now and then another."""

    text: ClassVar[list[int]] = []

    def __init__(self, setup: DrafterSetup) -> None:
        self._setup = setup

    def propose(self, seats: torch.Tensor) -> None:
        state, drafts = self._setup.seats, self._setup.drafts
        for seat in seats[seats > 0].tolist():
            begin = int(state.num_computed[seat]) + 1
            known = self.text[begin : begin + drafts.width - 1]
            if begin % 7 == 0 and known:
                known[-1] = 1
            drafts.count[seat] = len(known)
            drafts.tokens[seat, : len(known)] = torch.tensor(known, dtype=torch.int32)


def test_a_drafter_is_a_name(tiny_qwen3: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS._targets, "oracle", Oracle)
    prompt = [9, 4, 100, 31]
    answer = reference.greedy(prompt, 60)
    Oracle.text = [*prompt, *answer]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    wanted = {"method": "oracle", "num_speculative_tokens": 4, "policy": "always"}
    with LLM(str(tiny_qwen3), **OPTIONS, speculative_config=wanted) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        stats = llm.call("stats")
    assert output.outputs[0].token_ids == answer
    assert stats["num_steps"] < 20
    assert stats["num_accepted_tokens"] < stats["num_draft_tokens"]
