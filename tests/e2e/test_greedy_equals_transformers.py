"""However the work is cut and shared, greedy text is what transformers gives for each prompt alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.e2e.conftest import VOCAB, Reference

TOKENS = 128


def prompts(count: int, *, longest: int = 90, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def run(folder: Path, wanted: list[list[int]], tokens: int = TOKENS, **options: Any) -> list[list[int]]:
    options = {"device": "cpu", "num_threads": 1, "max_model_len": 320, "skip_tokenizer_init": True, **options}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    with LLM(str(folder), **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in wanted], params, use_tqdm=False)
        assert llm.call("check") is None  # no block, no seat is left behind
    return [output.outputs[0].token_ids for output in outputs]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks of 16": {"max_prefill_chunk": 16},
    "chunks of 64": {"max_prefill_chunk": 64},
    "a small token budget": {"max_num_batched_tokens": 48, "max_num_seqs": 16},
    "depth 2": {"async_scheduling": True},
    "depth 2, no prefix cache, chunks of 16": {
        "async_scheduling": True,
        "enable_prefix_caching": False,
        "max_prefill_chunk": 16,
    },
    "a pool so small that requests are preempted": {"num_gpu_blocks_override": 60, "async_scheduling": True},
}


@pytest.mark.parametrize("tokens", [40, pytest.param(TOKENS, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_64_of_mixed_lengths(tiny_qwen3: Path, reference: Reference, case: str, tokens: int) -> None:
    wanted = prompts(64)
    expected = [reference.greedy(p, tokens) for p in wanted]
    assert run(tiny_qwen3, wanted, tokens, **CASES[case]) == expected


@pytest.mark.parametrize("depth_2", [False, True])
def test_batch_of_one(tiny_qwen3: Path, reference: Reference, depth_2: bool) -> None:
    prompt = prompts(1, seed=5)
    assert run(tiny_qwen3, prompt, async_scheduling=depth_2) == [reference.greedy(prompt[0], TOKENS)]


@pytest.mark.parametrize("depth_2", [False, True])
def test_a_preemption_at_every_step(tiny_qwen3: Path, reference: Reference, depth_2: bool) -> None:
    wanted = prompts(6, longest=40, seed=11)
    expected = [reference.greedy(p, TOKENS) for p in wanted]
    assert run(tiny_qwen3, wanted, preempt_every_step=True, async_scheduling=depth_2) == expected


def test_shared_prefixes_hit_the_cache_and_change_nothing(tiny_qwen3: Path, reference: Reference) -> None:
    shared = prompts(1, seed=21, longest=1)[0] * 70
    wanted = [shared + tail for tail in prompts(8, longest=20, seed=22)]
    expected = [reference.greedy(p, TOKENS) for p in wanted]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    with LLM(str(tiny_qwen3), device="cpu", num_threads=1, max_model_len=320, skip_tokenizer_init=True) as llm:
        for first_pass in (True, False):
            outputs = llm.generate([{"prompt_token_ids": p} for p in wanted], params, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == expected
            cached = [o.num_cached_tokens for o in outputs]
            assert min(cached[1:] if first_pass else cached) >= 64, "the shared blocks were computed again"


def test_four_answers_share_the_prompt(tiny_qwen3: Path) -> None:
    prompt = prompts(1, seed=31)[0] * 3
    params = SamplingParams(n=4, temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, detokenize=False)
    with LLM(str(tiny_qwen3), device="cpu", num_threads=1, max_model_len=512, skip_tokenizer_init=True) as llm:
        both = [llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0] for _ in range(2)]
        answers = [[o.token_ids for o in output.outputs] for output in both]
        assert answers[0] == answers[1], "the same seed gives the same four answers"
        assert len({tuple(a) for a in answers[0]}) == 4
        greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
        stats = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        assert stats.num_cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.long
def test_a_worker_process_of_its_own(tiny_qwen3: Path, reference: Reference) -> None:
    wanted = prompts(8, seed=41)
    expected = [reference.greedy(p, TOKENS) for p in wanted]
    assert run(tiny_qwen3, wanted, distributed_executor_backend="mp") == expected


def test_seeded_sampling_is_the_same_at_any_batch(tiny_qwen3: Path) -> None:
    wanted = prompts(24, seed=51)
    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 320, "skip_tokenizer_init": True}

    def params(i: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.8, top_p=0.9, top_k=50, seed=i, max_tokens=48, ignore_eos=True, detokenize=False
        )

    with LLM(str(tiny_qwen3), **options) as llm:
        together = llm.generate(
            [{"prompt_token_ids": p} for p in wanted], [params(i) for i in range(24)], use_tqdm=False
        )
        for i in (0, 7, 23):
            alone = llm.generate([{"prompt_token_ids": wanted[i]}], params(i), use_tqdm=False)
            assert alone[0].outputs[0].token_ids == together[i].outputs[0].token_ids
    with LLM(str(tiny_qwen3), **options, preempt_every_step=True, enable_prefix_caching=False) as llm:
        again = llm.generate([{"prompt_token_ids": wanted[7]}, {"prompt_token_ids": wanted[8]}], [params(7), params(8)])
        assert [o.outputs[0].token_ids for o in again] == [together[i].outputs[0].token_ids for i in (7, 8)]


def test_prompt_logprobs_in_chunks_equal_those_of_the_whole(tiny_qwen3: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    wanted = prompts(3, seed=61, longest=80)
    params = SamplingParams(
        temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2, ignore_eos=True, detokenize=False
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    for chunk in (0, 16):
        with LLM(
            str(tiny_qwen3),
            device="cpu",
            num_threads=1,
            max_model_len=320,
            skip_tokenizer_init=True,
            max_prefill_chunk=chunk,
        ) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in wanted], params, use_tqdm=False)
        for prompt, output in zip(wanted, outputs, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + output.outputs[0].token_ids])).logits[0]
            expected = torch.log_softmax(logits, -1)
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            assert len(output.prompt_logprobs) == len(prompt)
            for i, entry in enumerate(output.prompt_logprobs[1:], start=1):
                assert entry is not None
                assert entry[prompt[i]].logprob == pytest.approx(expected[i - 1, prompt[i]].item(), abs=1e-3)
                assert len(entry) in (2, 3)
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            for j, entry in enumerate(logprobs):
                token = output.outputs[0].token_ids[j]
                assert entry[token].rank == 1
                assert entry[token].logprob == pytest.approx(expected[len(prompt) - 1 + j, token].item(), abs=1e-3)
